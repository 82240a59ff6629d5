"""All-gather of keys and values: each device attends from its own queries to the whole sequence.

Exchanges, over the axes of `act_seq`: one all-gather each of keys
and values forward, and a reduce-scatter each of dK and dV backward;
2 (r-1)/r B S K H elements sent per device each way on r ranks (the context parallelism of Llama 3,
arXiv 2407.21783, section 3.3.2). No exchange when the sequence is not split. Keys and values of the
whole sequence must fit on each device.
"""

import dataclasses

import jax

from layers.attention.kernels import CORE, Kernel, Placed, Task, chosen
from layers.attention.masking import Masking
from meshes.collectives.varying import varying
from meshes.context import Parallelism, current


@dataclasses.dataclass(frozen=True)
class AllGather:
    """See the module.

    Attributes:
        kernel: what attends on each device; where it cannot, the core does.
    """

    kernel: Kernel = CORE

    def __call__(
        self,
        q_BNTH: jax.Array,
        k_BKSH: jax.Array,
        v_BKSH: jax.Array,
        *,
        q_positions_BT: jax.Array,
        kv_positions_BS: jax.Array,
        q_segments_BT: jax.Array,
        kv_segments_BS: jax.Array,
        masking: Masking,
    ) -> jax.Array:
        """See `AttentionScheme`.

        Raises:
            ValueError: the rules keep keys and values split, or split the heads unevenly.
        """
        par = current()
        num_heads, num_kv_heads = q_BNTH.shape[1], k_BKSH.shape[1]
        gathered = par.axes("act_seq")
        if par.axes("act_kv_seq"):
            raise ValueError(
                f"rule 'act_kv_seq' -> {par.axes('act_kv_seq')}: the attention scheme all_gather "
                "reads all keys on each device; map 'act_kv_seq' to no axis, or choose a scheme "
                "that keeps them split"
            )
        task = _task(par, q_BNTH, k_BKSH, masking)
        kernel = chosen(self.kernel, task, par)

        def local(q, k, v, q_pos, kv_pos, q_seg, kv_seg):
            k, v = (_local_kv_heads(par, x, num_heads, num_kv_heads, q.shape[1]) for x in (k, v))
            for axis in reversed(gathered):
                k, v = (jax.lax.all_gather(x, axis, axis=2, tiled=True) for x in (k, v))
            shard = None if task.shards is None else jax.lax.axis_index(gathered)
            return kernel(task, q, k, v, Placed(q_pos, kv_pos, q_seg, kv_seg, shard))

        queries = par.spec(("act_batch", "act_heads", "act_seq", None), q_BNTH.shape, "queries")
        keys = par.spec(("act_batch", "act_kv_heads", "act_seq", None), k_BKSH.shape, "keys")
        of_queries = par.spec(("act_batch", "act_seq"))
        of_keys = par.spec(("act_batch", "act_kv_seq"))
        return jax.shard_map(
            local,
            in_specs=(queries, keys, keys, of_queries, of_keys, of_queries, of_keys),
            out_specs=queries,
            check_vma=kernel.typed,
        )(q_BNTH, k_BKSH, v_BKSH, q_positions_BT, kv_positions_BS, q_segments_BT, kv_segments_BS)


def _task(par: Parallelism, q_BNTH: jax.Array, k_BKSH: jax.Array, masking: Masking) -> Task:
    """What each device does: its queries, and all keys of the heads that they read."""
    batch, num_heads, length, head_dim = q_BNTH.shape
    heads = num_heads // par.ways("act_heads")
    same = length == k_BKSH.shape[2]  # a cache is longer than what is added to it
    return Task(
        q_shape=(batch // par.ways("act_batch"), heads, length // par.ways("act_seq"), head_dim),
        kv_shape=(
            batch // par.ways("act_batch"),
            max(1, heads * k_BKSH.shape[1] // num_heads),
            k_BKSH.shape[2],
            head_dim,
        ),
        dtype=q_BNTH.dtype.name,
        masking=masking,
        shards=par.ways("act_seq") if same else None,
    )


def _local_kv_heads(
    par: Parallelism, x: jax.Array, num_heads: int, num_kv_heads: int, local_heads: int
) -> jax.Array:
    """Choose the key/value heads that this device's query heads read, if it has more.

    Raises:
        ValueError: key/value heads are split over other axes than the major ones of the query
            heads, or the query heads of a device would straddle groups unevenly.
    """
    axes, kv_axes = par.axes("act_heads"), par.axes("act_kv_heads")
    if kv_axes == axes:
        return x
    if axes[: len(kv_axes)] != kv_axes:
        raise ValueError(
            f"rules 'act_heads' -> {axes} and 'act_kv_heads' -> {kv_axes}: key/value heads must be "
            "split as the query heads are, or over the first of their axes only, or not at all"
        )
    group = num_heads // num_kv_heads
    if local_heads % group and group % local_heads:
        raise ValueError(
            f"{num_heads} query heads over {num_heads // local_heads} devices leave {local_heads} "
            f"a device, which share {num_kv_heads} key/value heads unevenly (groups of {group}); "
            f"use a number of devices that makes {local_heads} a multiple or a divisor of {group}"
        )
    size = max(1, local_heads // group)
    first = jax.lax.axis_index(axes) * local_heads // group
    if kv_axes:
        first -= jax.lax.axis_index(kv_axes) * x.shape[1]
    return jax.lax.dynamic_slice_in_dim(varying(x, axes), first, size, 1)
