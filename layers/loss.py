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

from meshes.collectives.varying import own_slice, varying, vma
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

    names: tuple[str, str]
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
    token_axes = tuple(dict.fromkeys(par.axes("act_batch") + par.axes("act_seq")))
    specs = (PartitionSpec(),) * 3
    local = functools.partial(
        _local,
        head,
        vocab_axes=par.axes("vocab"),
        embed_axes=par.axes("embed"),
        token_axes=token_axes,
        sequence_axes=tuple(
            a for a in par.axes("act_residual_seq") if a not in par.axes("act_seq")
        ),
        with_gradient=with_gradient,
    )
    return jax.shard_map(
        local,
        in_specs=(x_spec, weight_spec, token_spec, token_spec),
        out_specs=(specs, (x_spec, weight_spec)) if with_gradient else (specs, None),
    )(x_BTD, weight, targets_BT, loss_weights_BT)


def _local(
    head: Head, x_BTD, weight, targets, weights,
    *, vocab_axes, embed_axes, token_axes, sequence_axes, with_gradient,
):  # fmt: skip
    """The loss of this device's tokens over its part of the vocabulary, then the reductions."""
    v_dim, d_dim = (1, 0) if head.names[0] == "embed" else (0, 1)
    w = weight.astype(x_BTD.dtype)
    for axis in reversed(embed_axes):
        to = "varying" if axis in token_axes else "invarying"
        w = jax.lax.all_gather(w, axis, axis=d_dim, tiled=True, to=to)
    for axis in reversed(sequence_axes):
        to = "varying" if axis in vocab_axes else "invarying"
        x_BTD = jax.lax.all_gather(x_BTD, axis, axis=1, tiled=True, to=to)
    shape = x_BTD.shape
    x_td = x_BTD.reshape((-1, shape[-1]))
    targets, weights = targets.reshape((-1,)), weights.reshape((-1,))
    if vocab_axes:
        targets = targets - jax.lax.axis_index(vocab_axes) * w.shape[v_dim]
    chunk = functools.partial(_chunk, head, vocab_axes=vocab_axes, with_gradient=with_gradient)
    rows = x_td.shape[0]
    if not head.chunk or head.chunk >= rows:
        sums, dx, dw = chunk(x_td, w, targets, weights)
    else:
        sums, dx, dw = _scan_chunks(head, chunk, x_td, w, targets, weights, vocab_axes=vocab_axes)
    sums = (*sums, jnp.sum(weights, dtype=sums[0].dtype))
    sums = jax.lax.psum(sums, token_axes) if token_axes else sums
    if not with_gradient:
        return sums, None
    dx = dx.reshape(shape).astype(head.reduce)
    for axis in sequence_axes:
        if axis in vocab_axes:
            dx = jax.lax.psum_scatter(dx, axis, scatter_dimension=1, tiled=True)
        else:
            dx = own_slice(dx, axis, 1)
    summed = tuple(axis for axis in vocab_axes if axis not in sequence_axes)
    dx = (jax.lax.psum(dx, summed) if summed else dx).astype(x_BTD.dtype)
    dw = dw.astype(head.reduce)
    for axis in embed_axes:
        if axis in token_axes:
            dw = jax.lax.psum_scatter(dw, axis, scatter_dimension=d_dim, tiled=True)
        else:
            dw = own_slice(dw, axis, d_dim)
    summed = tuple(axis for axis in token_axes if axis not in embed_axes)
    dw = jax.lax.psum(dw, summed) if summed else dw
    return sums, (dx, dw.astype(weight.dtype))


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
