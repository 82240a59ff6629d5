"""Turn the `op_name` of HLO metadata into the named scope that wrote the operation.

JAX's op names interleave our `jax.named_scope`s with its own machinery, as in
`jit(step)/transpose(jvp(layer))/while/body/closed_call/checkpoint/mlp/bd,df->bf/dot_general`.
Only the scopes (`layer.mlp`) mean something to a reader, and whether the operation belongs to the
forward pass, to its recomputation, or to the backward pass.

Limits: a user's scope named like JAX's machinery (`while`, `body`, ...) is dropped with it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Literal

Phase = Literal["forward", "recompute", "backward"]

_TRANSFORM = re.compile(r"([\w.\-]+)\((.*)\)$", re.DOTALL)
_TRANSPARENT = frozenset({"jvp", "transpose", "vmap", "linearize", "remat", "checkpoint"})
_MACHINERY = frozenset(
    "body body_pred call checkpoint closed_call cond cond_jaxpr core_call custom_gradient "
    "custom_jvp_call custom_lin custom_vjp_call custom_vjp_call_jaxpr eval_jaxpr jit pjit "
    "pjit_body remat remat2 remat_call rematted_computation run_state scan shard_map "
    "shmap_body while xla_call".split()
)
_BRANCH = re.compile(r"branch_\d+_fun$")


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """`path` joins the named scopes by dots, outermost first; "" outside every scope."""

    path: str
    phase: Phase


@functools.lru_cache(maxsize=65536)
def parse_scope(op_name: str) -> Scope:
    """Parse the `op_name` of an HLO instruction's metadata.

    The last component is the primitive (or several in parentheses where XLA merged operations),
    so it is never part of the path. Components with `->` are einsum's equations.
    """
    components = _split(op_name)
    names = [name for part in components[:-1] for name in _names(part)]
    phase: Phase = "forward"
    if "rematted_computation" in components or components[-1] == "remat2":
        phase = "recompute"
    elif "transpose(" in op_name:
        phase = "backward"
    return Scope(".".join(names), phase)


def _split(text: str) -> list[str]:
    """Split at slashes outside parentheses."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "/" and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _names(component: str) -> list[str]:
    """The named scopes in one component; a transform's parentheses may hold some."""
    match = _TRANSFORM.match(component)
    if match:
        if match.group(1) not in _TRANSPARENT:
            return []
        return [name for part in _split(match.group(2)) for name in _names(part)]
    machinery = component in _MACHINERY or _BRANCH.match(component) or "->" in component
    return [] if machinery or not component else [component]
