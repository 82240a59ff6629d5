"""Cross entropy of the next token, fused with the output projection.

B batch, T length, C tokens of a chunk, V vocabulary, D model. The vocabulary is split over its mesh
axes and the tokens are taken in chunks, so that logits exist as [C, V_local] only. Gradients are
made in the forward pass, while the logits are there: nothing is recomputed and no logits are kept
(the cotangent of a sum is a scalar). Exchanges, over the axes that split V: three all-reduces of
[tokens] in float32 (largest logit, sum of exponentials, target logit) and the reduction of dx, in
the layout of the residual stream; over the axes that split D, a gather of the head and a
reduce-scatter of its gradient; over the axes that split tokens, the sum of the head's gradient and
of the loss. Source: vocabulary-parallel cross entropy of Megatron-LM (arXiv 1909.08053, section 3).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from layers.embedding import row_axes
from meshes.collectives.partial import Moves
from meshes.collectives.varying import varying, vma
from meshes.context import current


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """Static description of the output projection and its loss.

    Attributes:
        names: logical names of the head: ("embed", "vocab"), or ("vocab", "embed") if tied.
        softcap: logits become cap * tanh(logits / cap); None is off.
        z_loss: weight of the squared log-partition.
        chunk: tokens of a device whose logits exist at a time; 0 is all.
        accumulate: dtype of logits and sums, by name.
        reduce: dtype of partial sums on the wire, by name.
    """

    names: tuple[str | None, ...]
    softcap: float | None
    z_loss: float
    chunk: int
    accumulate: str
    reduce: str

    @property
    def equation(self) -> str:
        return "td,dv->tv" if self.names[0] == "embed" else "td,vd->tv"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def cross_entropy(
    head: Head,
    x_BTD: jax.Array,
    weight: jax.Array,
    targets_BT: jax.Array,
    loss_weights_BT: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum the weighted cross entropy of every token.

    Args:
        head: the projection.
        x_BTD: final hidden states, (act_batch, act_residual_seq, act_embed), compute dtype.
        weight: the head, laid out as `head.names`.
        targets_BT: int32 next token, (act_batch, act_seq).
        loss_weights_BT: float32 weight of each token, likewise; 0 leaves a token out.

    Returns:
        (objective, loss, weights): the sums of weighted losses with and without the z loss, and of
        the weights, scalars in the accumulation dtype. Only the objective carries a gradient.
    """
    return _run(head, x_BTD, weight, targets_BT, loss_weights_BT, with_gradient=False)[0]


def _forward(head, x_BTD, weight, targets_BT, loss_weights_BT):
    return _run(head, x_BTD, weight, targets_BT, loss_weights_BT, with_gradient=True)


def _backward(head, gradients, cotangents):
    del head  # the gradients are those of the objective
    dx, dweight = gradients
    scale = cotangents[0]
    return (dx * scale.astype(dx.dtype), dweight * scale.astype(dweight.dtype), None, None)


cross_entropy.defvjp(_forward, _backward)


def _run(head: Head, x_BTD, weight, targets_BT, loss_weights_BT, *, with_gradient: bool):
    par = current()
    x_spec = par.spec(("act_batch", "act_residual_seq", "act_embed"), x_BTD.shape, "hidden")
    token_spec = par.spec(("act_batch", "act_seq"), targets_BT.shape, "targets")
    weight_spec = par.spec(head.names, weight.shape, "head")
    sequence = [a for a in par.axes("act_residual_seq") if a not in par.axes("act_seq")]
    embed_dim = head.names.index("embed")
    sums = (PartitionSpec(),) * 3
    local = functools.partial(
        _local,
        head,
        of_x=Moves(
            gathers=tuple((axis, 1) for axis in reversed(sequence)),
            sums=row_axes(par, "vocab"),
            reduce=head.reduce,
        ),
        of_weight=Moves(
            gathers=tuple((axis, embed_dim) for axis in reversed(par.axes("embed"))),
            sums=par.axes_of(("act_batch", "act_seq")),
            reduce=head.reduce,
        ),
        with_gradient=with_gradient,
    )
    return jax.shard_map(
        local,
        in_specs=(x_spec, weight_spec, token_spec, token_spec),
        out_specs=(sums, (x_spec, weight_spec)) if with_gradient else (sums, None),
    )(x_BTD, weight, targets_BT, loss_weights_BT)


def _local(
    head: Head, x_BTD, weight, targets, weights, *, of_x: Moves, of_weight: Moves, with_gradient
):
    """The loss of this device's tokens over its part of the vocabulary, then the reductions."""
    vocab_axes, token_axes = of_x.sums, of_weight.sums
    w = of_weight.whole(weight.astype(x_BTD.dtype))
    x = of_x.whole(x_BTD)
    x_td = x.reshape((-1, x.shape[-1]))
    targets, weights = targets.reshape((-1,)), weights.reshape((-1,))
    if vocab_axes:
        first = jax.lax.axis_index(vocab_axes) * w.shape[head.names.index("vocab")]
        targets = targets - first
    chunk = functools.partial(_chunk, head, vocab_axes=vocab_axes, with_gradient=with_gradient)
    if not head.chunk or head.chunk >= x_td.shape[0]:
        sums, dx, dw = chunk(x_td, w, targets, weights)
    else:
        sums, dx, dw = _scan_chunks(head, chunk, x_td, w, targets, weights, vocab_axes=vocab_axes)
    sums = (sums[0], sums[1], jnp.sum(weights, dtype=sums[0].dtype))
    sums = jax.lax.psum(sums, token_axes) if token_axes else sums
    if dx is None or dw is None:
        return sums, None
    dx = of_x.home(dx.reshape(x.shape)).astype(x_BTD.dtype)
    return sums, (dx, of_weight.home(dw).astype(weight.dtype))


def _scan_chunks(head: Head, chunk, x_td, w, targets, weights, *, vocab_axes):
    """Take the tokens a chunk at a time; the last one is padded with tokens of weight 0."""
    rows = x_td.shape[0]
    steps = -(-rows // head.chunk)
    pad = steps * head.chunk - rows

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape((steps, head.chunk) + x.shape[1:])

    first = jax.eval_shape(
        chunk, x_td[: head.chunk], w, targets[: head.chunk], weights[: head.chunk]
    )
    everywhere = vma(x_td) | vma(w) | vma(weights)
    by_tokens = everywhere - frozenset(vocab_axes)

    def body(carry, piece):
        sums, dw = carry
        new_sums, dx, new_dw = chunk(piece[0], w, piece[1], piece[2])
        sums = tuple(a + b for a, b in zip(sums, new_sums, strict=True))
        return (sums, None if dw is None else dw + new_dw), dx

    def zeros(like: jax.ShapeDtypeStruct, axes: frozenset[str]) -> jax.Array:
        return varying(jnp.zeros(like.shape, like.dtype), axes)

    start = (
        tuple(zeros(like, by_tokens) for like in first[0]),
        None if first[2] is None else zeros(first[2], everywhere),
    )
    (sums, dw), dx = jax.lax.scan(body, start, (split(x_td), split(targets), split(weights)))
    return sums, None if dx is None else dx.reshape((-1, x_td.shape[1]))[:rows], dw


def _chunk(head: Head, x_td, w, targets, weights, *, vocab_axes, with_gradient):
    """Loss of one chunk, and the gradients of its sum with respect to x and the head."""

    def over_vocabulary(operation, x):
        return operation(x, vocab_axes) if vocab_axes else x

    logits = jnp.einsum(head.equation, x_td, w, preferred_element_type=head.accumulate)
    slope = None
    if head.softcap is not None:
        bent = jnp.tanh(logits / head.softcap)
        logits, slope = bent * head.softcap, 1 - bent * bent
    largest = over_vocabulary(jax.lax.pmax, jnp.max(logits, axis=1))
    exponentials = jnp.exp(logits - largest[:, None])
    partition = over_vocabulary(jax.lax.psum, jnp.sum(exponentials, axis=1))
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    target_logit = over_vocabulary(jax.lax.psum, jnp.sum(jnp.where(is_target, logits, 0), axis=1))
    log_partition = largest + jnp.log(partition)
    loss = jnp.sum(weights * (log_partition - target_logit))
    z_loss = jnp.sum(weights * log_partition**2) * head.z_loss
    if not with_gradient:
        return (loss + z_loss, loss), None, None
    scale = weights * (1 + 2 * head.z_loss * log_partition) / partition
    dlogits = exponentials * scale[:, None] - jnp.where(is_target, weights[:, None], 0)
    if slope is not None:
        dlogits = dlogits * slope
    dlogits = dlogits.astype(x_td.dtype)
    _, operands = head.equation.split("->")[0].split(",")
    dx = jnp.einsum(f"tv,{operands}->td", dlogits, w, preferred_element_type=head.accumulate)
    dw = jnp.einsum(f"td,tv->{operands}", x_td, dlogits, preferred_element_type=head.accumulate)
    return (loss + z_loss, loss), dx, dw
