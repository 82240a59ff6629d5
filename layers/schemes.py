"""How a layer's exact computation is carried out: values that layers ask the parallelism for.

A scheme changes execution only, never the logits; adding one touches no layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from layers.attention.schemes import AttentionScheme, attention_scheme
from meshes.collectives.matmul import project
from meshes.context import current


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schemes:
    """The active schemes.

    Attributes:
        attention: attention over a split sequence.
        project: matrix products of sharded operands (`meshes.collectives.matmul.project`).
        remat: rematerialisation policy by name, see `rematerialise`.
        scan_layers: loop over stacked layers, instead of writing them out.
        loss_chunk: tokens of a device whose logits exist at a time; 0 is all.
    """

    attention: AttentionScheme = attention_scheme("all_gather")
    project: Callable[..., Any] = project
    remat: str = "none"
    scan_layers: bool = True
    loss_chunk: int = 0


# Results of matrix products with weights. JAX's own policy for dots sees none of them, because they
# are made inside shard_map and custom gradients.
PRODUCTS = ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up", "mlp_out")


def active() -> Schemes:
    """Return the schemes of the active parallelism; the defaults, if it names none."""
    schemes = current().schemes
    return Schemes() if schemes is None else schemes


def rematerialise(
    function: Callable[..., Any], policy: str, *, in_scan: bool
) -> Callable[..., Any]:
    """Wrap a layer so that its backward pass recomputes what the policy does not keep.

    Args:
        function: the layer.
        policy: `none` keeps what the backward pass reads; `full` only the layer's input; `dots`
            the results of matrix products with weights (`PRODUCTS`); `named:a,b` the activations
            tagged with these names; `offload:a,b` the same, in host memory.
        in_scan: the layer is a loop's body, where no common-subexpression barrier is needed.

    Raises:
        ValueError: unknown policy.
    """
    kind, _, listed = policy.partition(":")
    names = tuple(name for name in listed.split(",") if name)
    policies = jax.checkpoint_policies
    if kind == "none":
        return function
    if kind == "full":
        keep = policies.nothing_saveable
    elif kind == "dots":
        keep = policies.save_only_these_names(*PRODUCTS)
    elif kind == "named":
        keep = policies.save_only_these_names(*names)
    elif kind == "offload":
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        raise ValueError(f"unknown remat policy {policy!r}")
    return jax.checkpoint(function, policy=keep, prevent_cse=not in_scan)
