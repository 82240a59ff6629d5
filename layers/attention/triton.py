"""The GPU's attention kernel: flash attention of JAX's Pallas operations, compiled by Triton.

Limits: causal or not, with segments, and nothing else: windows, soft-capped scores and queries that
are a part of the sequence are left to the core. Keys and values are repeated for the query heads
that share them. Its dK and dV, and its dQ, each make the scores again.

B batch, T query length, S key/value length, N query heads, K key/value heads, H head dim.
"""

import dataclasses
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from layers.attention.kernels import Placed, Task, Work

# Tiles of JAX's kernel, forward and backward; a length that they do not divide has smaller ones.
LARGEST_BLOCK, LARGEST_BACKWARD_BLOCK = 128, 32
SMALLEST_BLOCK = 16  # of the GPU's matrix units


@dataclasses.dataclass(frozen=True)
class Triton:
    """Flash attention by Triton.

    Attributes:
        interpret: run it in plain JAX, anywhere and slowly (for tests).
    """

    interpret: bool = False
    name = "triton"
    # JAX's kernel does not say over which mesh axes its results vary.
    typed = False

    def obstacle(self, task: Task) -> str | None:
        """See `Kernel`."""
        if task.shards is None:
            return "only positions tell which keys a query sees"
        if task.shards > 1:
            return "it reads all queries of a sequence, which is split here"
        if task.masking.window is not None or task.masking.softcap is not None:
            return "it has neither windows nor soft caps"
        if min(blocks(task)) < SMALLEST_BLOCK or task.q_shape[3] < SMALLEST_BLOCK:
            return (
                f"lengths must be multiples of {SMALLEST_BLOCK} ({task.q_shape[2]} tokens) and "
                f"heads at least as wide ({task.q_shape[3]})"
            )
        if task.dtype not in ("bfloat16", "float16") and not self.interpret:
            return f"its products are of 16-bit numbers, not of {task.dtype}"
        return None

    def describe(self, task: Task) -> str:
        """See `Kernel`."""
        block, backward = blocks(task)
        return f"triton kernel, tiles of {block} tokens forward, {backward} backward"

    def work(self, task: Task) -> dict[str, Work]:
        """See `Kernel`: two products a tile forward, four for dK and dV, three for dQ."""
        block, backward = blocks(task)
        forward, again = (task.seen_tiles(size, size) * size * size for size in (block, backward))
        heads, head_dim = math.prod(task.q_shape[:2]), task.q_shape[3]
        item = jnp.dtype(task.dtype).itemsize
        whole = heads * task.q_shape[2]
        product = 2 * heads * head_dim
        # Each block of queries reads the keys and values of its tiles, and so on.
        return {
            "mha_forward": Work(
                flops=2 * product * forward,
                bytes=(2 * whole + 2 * heads * forward // block) * head_dim * item,
            ),
            "mha_backward": Work(
                flops=7 * product * again,
                bytes=(7 * whole + 4 * heads * again // backward) * head_dim * item,
            ),
        }

    def __call__(
        self, task: Task, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, placed: Placed
    ) -> jax.Array:
        """See `Kernel`."""
        with warnings.catch_warnings():
            # Deprecated since jax 0.12 in favour of a package of its own; still there.
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu import attention as library

        block, backward = blocks(task)
        sizes = library.BlockSizes(
            block_q=block, block_k=block, block_q_dkv=backward, block_kv_dkv=backward,
            block_q_dq=backward, block_kv_dq=backward,
        )  # fmt: skip
        k_BNSH, v_BNSH = (jnp.repeat(x, task.group, axis=1) for x in (k_BKSH, v_BKSH))
        context_BTNH: Any = library.mha(
            *(x.swapaxes(1, 2) for x in (q_BNTH, k_BNSH, v_BNSH)),
            segment_ids=placed.q_segments_BT,
            sm_scale=task.masking.scale,
            causal=task.masking.causal,
            block_sizes=sizes,
            interpret=self.interpret,
        )
        return checkpoint_name(context_BTNH.swapaxes(1, 2), "attention_context")


def blocks(task: Task) -> tuple[int, int]:
    """Tokens of a tile's sides, forward and backward: powers of two that divide the length."""
    divisor = math.gcd(task.q_shape[2], LARGEST_BLOCK)
    return divisor, min(divisor, LARGEST_BACKWARD_BLOCK)
