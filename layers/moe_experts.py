"""The experts' feed-forward networks on rows sorted by expert.

B blocks, M rows of a block, E experts of this device, D model, F feed-forward. A loop takes one
block at a time, with its expert's weights: the work is that of the pairs that exist, up to the
padding of an expert's last block. `jax.lax.ragged_dot` would say the same, but where XLA has no
kernel for it, as on CPU, it becomes a masked dense product of E times the work: with E = 8 it took
10 times the loop's time. The loop was faster there than one batched product too.

The weights are gathered over the axes that split their model dimension when they are needed,
forward and backward, and never kept; their gradients are reduce-scattered back. Kept for the
backward pass: rows, and the inputs of the activation. Limit: with `skip_unused` the number of trips
is known at run time only.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from layers.feedforward import ACTIVATIONS
from meshes.collectives.partial import Moves
from meshes.collectives.varying import varying, vma

Weights = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Static description of the experts' computation.

    Attributes:
        activation: by name; a gated one has two inward weights.
        weights: how each weight is split, inward ones first, then the one outward.
        skip_unused: stop after the last block in use, instead of computing empty ones.
        accumulate: dtype of the sums inside a product, by name.
    """

    activation: str
    weights: tuple[Moves, ...]
    skip_unused: bool
    accumulate: str

    def product(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a, b, preferred_element_type=self.accumulate)

    def activate(self, *inward: jax.Array) -> jax.Array:
        hidden = ACTIVATIONS[self.activation](inward[0])
        return hidden * inward[1] if len(inward) > 1 else hidden

    def trips(self, experts_B: jax.Array, num_experts: int) -> jax.Array | int:
        """Blocks to compute: a number where all are, so that the compiler knows it."""
        if self.skip_unused:
            return jnp.sum(experts_B < num_experts, dtype=jnp.int32)
        return experts_B.size

    def gather(self, weights: Weights, dtype: jnp.dtype) -> Weights:
        return tuple(
            moves.whole(w.astype(dtype)) for moves, w in zip(self.weights, weights, strict=True)
        )


def apply_experts(
    experts: Experts, rows_BMD: jax.Array, experts_B: jax.Array, weights: Weights
) -> jax.Array:
    """Send every row through its block's expert.

    Args:
        experts: the computation.
        rows_BMD: rows in the compute dtype; empty ones are zero.
        experts_B: int32 expert of each block; E for a block of empty rows, after all others.
        weights: local shards: inward [E, D, F] (gate and up, or up alone), then outward [E, F, D].

    Returns:
        [B, M, D] in the compute dtype. If F is split, each device holds its part of the sum.
    """
    return _apply(experts, rows_BMD, experts_B, weights)


def _run(
    experts: Experts, rows_BMD: jax.Array, experts_B: jax.Array, weights: Weights
) -> tuple[jax.Array, Weights]:
    whole = experts.gather(weights, rows_BMD.dtype)
    inward, outward = whole[:-1], whole[-1]
    num_experts = outward.shape[0]

    def step(b: jax.Array, carry):
        out_BMD, before = carry
        e = jnp.minimum(_get(experts_B, b), num_experts - 1)
        row_MD = _get(rows_BMD, b)
        pre = [
            experts.product("md,df->mf", row_MD, _get(w, e)).astype(row_MD.dtype) for w in inward
        ]
        out_MD = experts.product("mf,fd->md", experts.activate(*pre), _get(outward, e))
        return _put(out_BMD, b, out_MD), tuple(map(_put, before, (b,) * len(pre), pre))

    out_BMD = _zeros(rows_BMD, rows_BMD.shape)
    before_BMF = _zeros(rows_BMD, rows_BMD.shape[:2] + outward.shape[1:2])
    start = (out_BMD, (before_BMF,) * len(inward))
    return jax.lax.fori_loop(0, experts.trips(experts_B, num_experts), step, start)


def _forward(experts: Experts, rows_BMD: jax.Array, experts_B: jax.Array, weights: Weights):
    out_BMD, before = _run(experts, rows_BMD, experts_B, weights)
    names = ("mlp_gate", "mlp_up")[-len(before) :]
    before = tuple(map(checkpoint_name, before, names))
    return out_BMD, (rows_BMD, experts_B, weights, before)


def _backward(experts: Experts, residuals, dout_BMD: jax.Array):
    rows_BMD, experts_B, weights, before = residuals
    whole = experts.gather(weights, rows_BMD.dtype)
    inward, outward = whole[:-1], whole[-1]
    num_experts = outward.shape[0]

    def step(b: jax.Array, carry):
        drows_BMD, dweights = carry
        e = jnp.minimum(_get(experts_B, b), num_experts - 1)
        row_MD, dout_MD = _get(rows_BMD, b), _get(dout_BMD, b)
        hidden_MF, pull = jax.vjp(experts.activate, *(_get(x, b) for x in before))
        dhidden_MF = experts.product("md,fd->mf", dout_MD, _get(outward, e))
        dpre = pull(dhidden_MF.astype(hidden_MF.dtype))
        drow_MD = functools.reduce(
            jnp.add,
            (
                experts.product("mf,df->md", d, _get(w, e))
                for d, w in zip(dpre, inward, strict=True)
            ),
        )
        news = [experts.product("md,mf->df", row_MD, d) for d in dpre]
        news.append(experts.product("mf,md->fd", hidden_MF, dout_MD))
        dweights = tuple(
            _put(total, e, _get(total, e) + new) for total, new in zip(dweights, news, strict=True)
        )
        return _put(drows_BMD, b, drow_MD), dweights

    start = (
        _zeros(rows_BMD, rows_BMD.shape),
        tuple(_zeros(rows_BMD, w.shape, experts.accumulate) for w in whole),
    )
    drows_BMD, dweights = jax.lax.fori_loop(0, experts.trips(experts_B, num_experts), step, start)
    dweights = tuple(
        moves.home(dw).astype(w.dtype)
        for moves, dw, w in zip(experts.weights, dweights, weights, strict=True)
    )
    return drows_BMD, None, dweights


_apply = jax.custom_vjp(lambda *arguments: _run(*arguments)[0], nondiff_argnums=(0,))
_apply.defvjp(_forward, _backward)


def _get(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, i: jax.Array, new: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), i, 0)


def _zeros(like: jax.Array, shape: tuple[int, ...], dtype: str | None = None) -> jax.Array:
    """Zeros that vary over the axes that `like` varies over."""
    return varying(jnp.zeros(shape, dtype or like.dtype), vma(like))
