"""What attends on one device: the tiled core, or one of JAX's Pallas kernels.

A kernel is a value that an attention scheme holds and calls inside `jax.shard_map`, on the device's
own queries and on the keys that the scheme brought there. Kernels are faster than the core on their
hardware, and narrower: a kernel says by `obstacle` what it cannot express. The scheme then calls
the core, which can express everything, and says so in the parallelism's remarks.

B batch, T query length, S key/value length, N query heads, K key/value heads, H head dim.
"""

import dataclasses
from typing import Protocol

import jax

from layers.attention.core import attend
from layers.attention.masking import Masking
from meshes.context import Parallelism


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What one device has to do, as far as it is known while tracing.

    Attributes:
        q_shape: local queries [B, N, T, H].
        kv_shape: keys and values that they read, [B, K, S, H].
        dtype: of all of them.
        masking: which keys a query sees.
        shards: into how many parts the sequence of the queries is split, where queries and keys are
            the same tokens, in order, with positions that go up by one within a segment: key i has
            index i, and this device's queries are one of the parts. None promises nothing, and
            positions alone tell.
    """

    q_shape: tuple[int, int, int, int]
    kv_shape: tuple[int, int, int, int]
    dtype: str
    masking: Masking
    shards: int | None

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.q_shape[1] // self.kv_shape[1]

    def seen_tiles(self, block: int, kv_block: int) -> int:
        """Tiles of queries by keys that a head has to compute, of the last part of a sequence.

        Under a causal mask the last part sees most, and the slowest device sets the pace.
        """
        length, kv_length = self.q_shape[2], self.kv_shape[2]
        first = kv_length - length
        return sum(
            self.masking.sees_block(first + i, block, j, kv_block)
            for i in range(0, length, block)
            for j in range(0, kv_length, kv_block)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one run of a kernel's program costs a device.

    Attributes:
        flops: of its matrix products, a multiply-add being two, of all tiles that it visits.
        bytes: to and from main memory.
    """

    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where tokens stand.

    Attributes:
        q_positions_BT: int32 position of each query in its segment.
        kv_positions_BS: int32 position of each key.
        q_segments_BT: int32 segment of each query.
        kv_segments_BS: int32 segment of each key.
        shard: which part of the sequence this device's queries are; None where `Task.shards` is.
    """

    q_positions_BT: jax.Array
    kv_positions_BS: jax.Array
    q_segments_BT: jax.Array
    kv_segments_BS: jax.Array
    shard: jax.Array | None


class Kernel(Protocol):
    """Attention of local arrays.

    Attributes:
        name: what it is called.
        typed: it works under shard_map's checks of what varies over which mesh axes.
    """

    @property
    def name(self) -> str: ...

    @property
    def typed(self) -> bool: ...

    def obstacle(self, task: Task) -> str | None:
        """Why it cannot do this, as the end of "..., since"; None if it can."""
        ...

    def describe(self, task: Task) -> str:
        """Name and block sizes, for the report."""
        ...

    def work(self, task: Task) -> dict[str, Work]:
        """Name of each program that it runs -> cost, where the compiler's text does not say it."""
        ...

    def __call__(
        self, task: Task, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, placed: Placed
    ) -> jax.Array:
        """Context [B, N, T, H] in the queries' dtype; differentiable in q, k and v."""
        ...


@dataclasses.dataclass(frozen=True)
class Core:
    """The tiled core in plain JAX: any mask, any hardware."""

    name = "jnp"
    typed = True

    def obstacle(self, task: Task) -> str | None:
        """See `Kernel`."""
        del task

    def describe(self, task: Task) -> str:
        """See `Kernel`."""
        del task
        return "tiled jnp core"

    def work(self, task: Task) -> dict[str, Work]:
        """See `Kernel`: its products stand in the program."""
        del task
        return {}

    def __call__(
        self, task: Task, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, placed: Placed
    ) -> jax.Array:
        """See `Kernel`."""
        masking = task.masking
        return attend(
            q_BNTH, k_BKSH, v_BKSH,
            q_positions_BT=placed.q_positions_BT, kv_positions_BS=placed.kv_positions_BS,
            q_segments_BT=placed.q_segments_BT, kv_segments_BS=placed.kv_segments_BS,
            causal=masking.causal, window=masking.window, scale=masking.scale,
            softcap=masking.softcap, aligned=task.shards == 1,
        )  # fmt: skip


CORE = Core()


def chosen(kernel: Kernel, task: Task, par: Parallelism) -> Kernel:
    """The kernel, or the core where it cannot do the task; a remark says which, and why."""
    obstacle = kernel.obstacle(task)
    if obstacle is None:
        par.remark(f"Attention on each device: {kernel.describe(task)}.")
        par.kernels.update(kernel.work(task))
        return kernel
    par.remark(
        f"Attention on each device: {CORE.describe(task)} instead of the {kernel.name} kernel, "
        f"since {obstacle}."
    )
    return CORE
