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
from meshes.collectives.partial import Moves, enter, leave
from meshes.context import Parallelism, current
from meshes.rules import Axes


def row_axes(par: Parallelism, name: str | None) -> Axes:
    """Mesh axes over which the rows of a table are split.

    Raises:
        ValueError: one of them splits tokens too: its devices hold different tokens, and the sum
            over the rows that each finds would mix them.
    """
    axes = par.axes(name)
    for tokens in ("act_batch", "act_seq"):
        shared = [axis for axis in par.axes(tokens) if axis in axes]
        if shared:
            raise ValueError(
                f"rules {name!r} and {tokens!r} both map to the mesh axis {shared[0]!r}, but the "
                "devices that share a vocabulary must hold the same tokens; map 'embed' to "
                f"{shared[0]!r} in place of {name!r}"
            )
    return axes


def lookup(table: nnx.Param, ids_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Read rows of a table.

    Args:
        table: [V, D] parameter; either dimension may be split.
        ids_BT: int32 row of each token, (act_batch, act_seq); ids outside the table read zeros
            where V is split, and its last row otherwise.
        dtype: of the result; rows are cast before they are exchanged.

    Returns:
        [B, T, D], laid out as (act_batch, act_residual_seq, act_embed).

    Raises:
        ValueError: the rules split the rows over axes that split tokens.
    """
    par = current()
    rows, columns = weight_names(table)
    ids = par.spec(("act_batch", "act_seq"), ids_BT.shape, "tokens")
    residual = par.spec(
        ("act_batch", "act_residual_seq", "act_embed"),
        (*ids_BT.shape, table.shape[1]),
        "residual stream",
    )
    split_rows = row_axes(par, rows)
    scattered = tuple(a for a in par.axes("act_residual_seq") if a not in par.axes("act_seq"))
    of_table = Moves(
        gathers=tuple((axis, 1) for axis in reversed(par.axes(columns))),
        sums=par.axes_of(("act_batch", "act_seq")),
    )
    of_result = Moves(
        gathers=tuple((axis, 1) for axis in reversed(scattered)),
        sums=split_rows,
        reduce=jnp.dtype(dtype).name,
    )

    def local(table: jax.Array, ids: jax.Array) -> jax.Array:
        table = enter(of_table, table.astype(dtype))
        if not split_rows:
            return leave(of_result, jnp.take(table, ids, axis=0, mode="clip"), dtype)
        first = jax.lax.axis_index(split_rows) * table.shape[0]
        mine = (ids >= first) & (ids < first + table.shape[0])
        found = jnp.take(table, jnp.where(mine, ids - first, 0), axis=0, mode="clip")
        return leave(of_result, jnp.where(mine[..., None], found, 0), dtype)

    whole = table[...]
    table_spec = par.spec(weight_names(table), whole.shape, "embedding")
    return jax.shard_map(local, in_specs=(table_spec, ids), out_specs=residual)(whole, ids_BT)
