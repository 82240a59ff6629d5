"""The TPU's attention kernel: splash attention of JAX's Pallas operations.

Softmax attention in tiles that live in on-chip memory, forward and backward (dK, dV and dQ in one
kernel), with a static mask: tiles that no query sees are never fetched. Segments are masked inside
tiles. Under a split sequence each device runs the same program with its own part of the tables that
say which tiles to fetch.

Limits: the mask knows indices, not positions, so that tokens must stand in order (`Task.shards`);
lengths are multiples of 128. The scale is multiplied into the queries, in their dtype.

B batch, T query length, S key/value length, N query heads, K key/value heads, H head dim.
"""

import dataclasses
import math
from typing import Any

import jax

from layers.attention.kernels import Placed, Task, Work
from layers.attention.masking import Masking

LANES = 128
# Small tiles leave out more of a causal mask, large ones keep the matrix unit busier.
LARGEST_BLOCK = 512
# The backward kernel writes one dQ a block of keys, to be summed after it: fewer, larger blocks.
LARGEST_BACKWARD_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Splash:
    """Splash attention.

    Attributes:
        interpret: run it in plain JAX, anywhere and slowly (for tests).
    """

    interpret: bool = False
    name = "splash"
    # JAX's kernel does not say over which mesh axes its results vary.
    typed = False

    def obstacle(self, task: Task) -> str | None:
        """See `Kernel`."""
        if task.shards is None:
            return "only positions tell which keys a query sees"
        lengths = task.q_shape[2], task.kv_shape[2]
        if any(length % LANES for length in lengths):
            return f"{lengths[0]} queries and {lengths[1]} keys are not multiples of {LANES}"
        if task.dtype not in ("bfloat16", "float32"):
            return f"it does not compute in {task.dtype}"
        return None

    def describe(self, task: Task) -> str:
        """See `Kernel`."""
        block, kv_block, backward = blocks(task)
        return (
            f"splash kernel, tiles of {block} queries by {kv_block} keys forward, {backward} "
            "backward"
        )

    def work(self, task: Task) -> dict[str, Work]:
        """See `Kernel`: two products a tile forward, five backward."""
        block, kv_block, backward = blocks(task)
        tiles, again = task.seen_tiles(block, kv_block), task.seen_tiles(block, backward)
        heads, head_dim = math.prod(task.q_shape[:2]), task.q_shape[3]
        kv = math.prod(task.kv_shape)
        item = jax.numpy.dtype(task.dtype).itemsize
        queries = math.prod(task.q_shape)
        product = 2 * heads * head_dim
        return {
            # Queries once, keys and values of each tile; the context, and a row of lanes a query.
            "splash_mha_fwd": Work(
                flops=2 * product * tiles * block * kv_block,
                bytes=(2 * queries + 2 * heads * tiles * kv_block * head_dim) * item
                + 4 * LANES * queries // head_dim,
            ),
            # Keys and values once, dK and dV; queries and dO of each tile; a dQ a block of keys.
            "splash_mha_dkv": Work(
                flops=5 * product * again * block * backward,
                bytes=(4 * kv + 2 * heads * again * block * head_dim) * item
                + queries * (task.kv_shape[2] // backward) * item,
            ),
        }

    def __call__(
        self, task: Task, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, placed: Placed
    ) -> jax.Array:
        """See `Kernel`."""
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        assert task.shards is not None and placed.shard is not None
        kernel = _kernel(task, task.shards, interpret=self.interpret)
        if task.shards > 1:
            kernel = _own_part(kernel, placed.shard, task.shards)
        q_BNTH = q_BNTH * jax.numpy.asarray(task.masking.scale, q_BNTH.dtype)
        segments = SegmentIds(placed.q_segments_BT, placed.kv_segments_BS)
        return jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, segments)


def blocks(task: Task) -> tuple[int, int, int]:
    """Queries of a tile, and its keys in the forward and in the backward kernel."""
    length, kv_length = task.q_shape[2], task.kv_shape[2]
    return (
        _largest_divisor(length, LARGEST_BLOCK),
        _largest_divisor(kv_length, LARGEST_BLOCK),
        _largest_divisor(kv_length, LARGEST_BACKWARD_BLOCK),
    )


def _largest_divisor(length: int, most: int) -> int:
    """The largest multiple of the lanes, up to `most`, that divides a length."""
    return max(size for size in range(LANES, most + 1, LANES) if length % size == 0)


def _mask(masking: Masking, length: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import CausalMask, FullMask, LocalMask

    shape = (length, length)
    if masking.window is not None:
        return LocalMask(shape, (masking.window - 1, 0 if masking.causal else None), offset=0)
    return CausalMask(shape) if masking.causal else FullMask(shape)


def _kernel(task: Task, shards: int, *, interpret: bool) -> Any:
    """The kernel of all parts of the sequence."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    block, kv_block, backward = blocks(task)
    sizes = library.BlockSizes(
        block_q=block, block_kv=kv_block, block_kv_compute=kv_block,
        block_q_dkv=block, block_kv_dkv=backward,
        block_kv_dkv_compute=_largest_divisor(backward, LARGEST_BLOCK),
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    # One head's mask serves all heads.
    mask = library.MultiHeadMask([_mask(task.masking, task.kv_shape[2])])
    return library.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=shards,
        attn_logits_soft_cap=task.masking.softcap,
        residual_checkpoint_name="attention_context",
        interpret=interpret,
    )


def _own_part(kernel: Any, shard: jax.Array, shards: int) -> Any:
    """The kernel with the tables of one part of the queries."""

    def part(table: jax.Array) -> jax.Array:
        dim = table.ndim - 2 if table.ndim > 1 else 0  # [heads, T blocks, S blocks] or [T]
        size = table.shape[dim] // shards
        return jax.lax.dynamic_slice_in_dim(table, shard * size, size, dim)

    return jax.tree.map(part, kernel)
