"""Rematerialisation by name: what a layer keeps for its backward pass, and what it recomputes.

Layers tag activations with `checkpoint_name`; a policy lists the tags that are kept, on the device
or in host memory. A tag that no layer has is an error: JAX would silently keep nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

# Results of matrix products with weights. JAX's own policy for dots sees none of them, because they
# are made inside shard_map and custom gradients.
PRODUCTS = (
    "query", "key", "value", "attention_out", "mlp_gate", "mlp_up", "mlp_out", "moe_router",
    "moe_out",
)  # fmt: skip


def rematerialise(
    function: Callable[..., Any], policy: str, *, in_scan: bool
) -> Callable[..., Any]:
    """Wrap a layer so that its backward pass recomputes what the policy does not keep.

    Args:
        function: the layer; its arguments are pytrees of arrays.
        policy: `none` keeps what the backward pass reads; `full` only the layer's input; `dots`
            the results of matrix products with weights (`PRODUCTS`); `named:a,b` the activations
            tagged with these names; `offload:a,b` the same, in host memory.
        in_scan: the layer is a loop's body, where no common-subexpression barrier is needed.

    Raises:
        ValueError: unknown policy; or, when the layer is called, a name that it does not tag.
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
    kept = jax.checkpoint(function, policy=keep, prevent_cse=not in_scan)
    if not names:
        return kept

    def checked(*arguments: Any) -> Any:
        known = tags(function, *arguments)
        for name in names:
            if name not in known:
                raise ValueError(
                    f"parallel.remat names {name!r}, which no layer of this model tags; "
                    f"expected names of {', '.join(known)}"
                )
        return kept(*arguments)

    return checked


def tags(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """List the names that `function` gives to activations, those of custom gradients included."""
    leaves, treedef = jax.tree.flatten(arguments)
    floating = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) for leaf in leaves]

    def linearised(leaves: list[jax.Array]) -> Any:
        # Tags inside a custom gradient are met only where it is differentiated.
        def of(differentiated: list[jax.Array]) -> Any:
            taken = iter(differentiated)
            full = [next(taken) if f else x for f, x in zip(floating, leaves, strict=True)]
            return function(*jax.tree.unflatten(treedef, full))

        return jax.vjp(of, [x for f, x in zip(floating, leaves, strict=True) if f])

    return sorted(set(_names(jax.make_jaxpr(linearised)(leaves).jaxpr)))


def _names(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _names(inner)
