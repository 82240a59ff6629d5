"""Embedding tables, split by vocabulary: each device looks up the rows it holds.

B batch, T length, V vocabulary, D model. Exchanges: the gather of the table over the axes that
split D (FSDP), and one sum of [B, T, D] over the axes that split V: an all-reduce, or a
reduce-scatter where the residual stream is split over them (Megatron-LM, arXiv 1909.08053, section
3).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from layers.linear import weight_names
from meshes.collectives.varying import own_slice, varying, vma
from meshes.context import current


def lookup(table: nnx.Param, ids_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Read rows of a table.

    Args:
        table: [V, D] parameter; either dimension may be split.
        ids_BT: int32 row of each token, (act_batch, act_seq); ids outside the table read zeros
            where V is split, and its last row otherwise.
        dtype: of the result; rows are cast before they are exchanged.

    Returns:
        [B, T, D], laid out as (act_batch, act_residual_seq, act_embed).
    """
    par = current()
    rows, columns = weight_names(table)
    ids = par.spec(("act_batch", "act_seq"), ids_BT.shape, "tokens")
    result = par.spec(("act_batch", "act_residual_seq", "act_embed"))
    row_axes = par.axes(rows)
    scattered = tuple(a for a in par.axes("act_residual_seq") if a not in par.axes("act_seq"))

    def local(table: jax.Array, ids: jax.Array) -> jax.Array:
        # Varying before the gather, so that its transpose scatters before it sums over data.
        table = varying(table.astype(dtype), vma(ids))
        for axis in reversed(par.axes(columns)):
            to = "varying" if axis in vma(ids) else "invarying"
            table = jax.lax.all_gather(table, axis, axis=1, tiled=True, to=to)
        if row_axes:
            first = jax.lax.axis_index(row_axes) * table.shape[0]
            mine = (ids >= first) & (ids < first + table.shape[0])
            local_ids = jnp.where(mine, ids - first, 0)
            x = jnp.where(mine[..., None], jnp.take(table, local_ids, axis=0, mode="clip"), 0)
        else:
            x = jnp.take(table, ids, axis=0, mode="clip")
        for axis in scattered:
            if axis in row_axes:
                x = jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)
            else:
                x = own_slice(x, axis, 1)
        summed = tuple(axis for axis in row_axes if axis not in scattered)
        return jax.lax.psum(x, summed) if summed else x

    table_spec = par.spec(weight_names(table), table[...].shape, "embedding")
    return jax.shard_map(local, in_specs=(table_spec, ids), out_specs=result)(table[...], ids_BT)
