"""From tensors of another format to sharded parameters, and back.

Each process reads the rows that its own devices hold, one tensor of theirs at a time, into buffers
of the devices' own layout; so host memory holds the local part of one parameter of ours and one
tensor of theirs, however large the model is. On the CPU a buffer becomes the device's array without
a copy. Exporting gathers one tensor at a time. Names, shapes and the absence of surplus are checked
before anything is read.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.checkpoint import flatten
from paxlike.interop.mapping import Index, Part, Shape, Table, parts
from paxlike.interop.safetensors import ToWrite

# XLA's CPU client takes over a buffer that is aligned so, instead of copying it.
_ALIGNMENT = 64

# Buffers that some files carry beside the parameters: they follow from the configuration.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq|rope_freqs\.weight")

# A tied head that is stored all the same must be the embedding.
_TIED = {
    "lm_head.weight": "model.embed_tokens.weight",
    "output.weight": "token_embd.weight",
}


class Source(Protocol):
    """Tensors by name.

    Attributes:
        shapes: name -> shape.
    """

    shapes: dict[str, Shape]

    def where(self, name: str) -> str:
        """The file of a tensor, for messages."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor, of any floating-point dtype."""
        ...


def load(source: Source, table: Table, abstract: Any, what: str) -> Any:
    """Read parameters.

    Args:
        source: their tensors.
        table: of the family.
        abstract: our parameters: shapes, dtypes and concrete shardings.
        what: what is read, for messages.

    Returns:
        The parameters, on their devices, converted to the dtypes of `abstract`.

    Raises:
        ValueError: tensors are missing, left over or of other shapes; the message names them.
    """
    leaves = flatten(abstract)
    wanted = list(parts(table, {path: x.shape for path, x in leaves.items()}))
    _check(source, wanted, what)
    arrays = []
    for path, leaf in leaves.items():
        arrays.append(_load_parameter([p for p in wanted if p.row.ours == path], leaf, source))
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def _check(source: Source, wanted: list[Part], what: str) -> None:
    names = {part.name: part.their_shape for part in wanted}
    problems = []
    for name, shape in names.items():
        if name not in source.shapes:
            problems.append(f"tensor {name!r} of shape {shape} is missing")
        elif source.shapes[name] != shape:
            problems.append(
                f"tensor {name!r} in {source.where(name)} has shape {source.shapes[name]}, and the "
                f"configuration means {shape}"
            )
    for name in source.shapes.keys() - names.keys():
        twin = _TIED.get(name)
        if twin in names and not problems and _equal(source, name, twin):
            continue
        if twin in names:
            problems.append(
                f"tensor {name!r} in {source.where(name)} is another than {twin!r}, though the "
                "configuration ties them (tie_word_embeddings)"
            )
        elif not _DERIVED.fullmatch(name):
            problems.append(f"tensor {name!r} in {source.where(name)} has no place in the model")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"{what} does not fit: {'; '.join(problems[:4])}{more}")


def _equal(source: Source, one: str, other: str) -> bool:
    if source.shapes[one] != source.shapes[other]:
        return False
    rows, step = source.shapes[one][0], 4096
    return all(
        np.array_equal(source.read(one, index), source.read(other, index))
        for index in ((slice(i, min(i + step, rows)), slice(None)) for i in range(0, rows, step))
    )


def _load_parameter(wanted: list[Part], leaf: Any, source: Source) -> jax.Array:
    """Read one parameter of ours; every device gets its own slice of it."""
    places = {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items()
    }
    buffers = {
        place: _aligned(tuple(stop - start for start, stop in place), leaf.dtype)
        for place in dict.fromkeys(places.values())
    }
    for part in wanted:
        read, depth = _once(source, part.name), len(part.numbers)
        for place, buffer in buffers.items():
            inside = zip(part.numbers, place[:depth], strict=True)
            if all(start <= number < stop for number, (start, stop) in inside):
                at = tuple(n - place[i][0] for i, n in enumerate(part.numbers))
                buffer[at] = part.read(read, tuple(slice(*bounds) for bounds in place[depth:]))
    arrays = [jax.device_put(buffers[place], device) for device, place in places.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def _once(source: Source, name: str) -> Callable[[Index], np.ndarray]:
    """Reads rows of a tensor once for all devices that hold different columns of them."""

    @functools.lru_cache(1)
    def rows(start: int, stop: int) -> np.ndarray:
        whole = (slice(None),) * (len(source.shapes[name]) - 1)
        return source.read(name, (slice(start, stop), *whole))

    return lambda index: rows(index[0].start, index[0].stop)[(slice(None), *index[1:])]


def _aligned(shape: Shape, dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def plan(params: Any, table: Table) -> list[tuple[Part, ToWrite]]:
    """What parameters are in the other format: their tensors, in the order of the table.

    Args:
        params: parameters, or their shapes.
        table: of the family.

    Raises:
        ValueError: a parameter has no place in the table.
    """
    leaves = flatten(params)
    return [
        (part, ToWrite(part.name, part.their_shape, np.dtype(leaves[part.row.ours].dtype)))
        for part in parts(table, {path: x.shape for path, x in leaves.items()})
    ]


def tensors(params: Any, table: Table) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters (or gradients, or anything of their form) as tensors of the other format.

    Called on every process; each gets every tensor, one at a time.
    """
    leaves = flatten(params)
    for part, _ in plan(params, table):
        yield part.name, part.to_theirs(_gathered(leaves[part.row.ours], part.numbers))


def _gathered(x: jax.Array, numbers: tuple[int, ...]) -> np.ndarray:
    """A part of a sharded array, on the host."""
    index = tuple(jnp.int32(number) for number in numbers)
    return np.asarray(_take(x, index))


@jax.jit
def _take(x: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    for number in index:
        # Whole before it is indexed: a split dimension cannot be, under explicit sharding.
        x = jax.reshard(x, jax.P(None, *jax.typeof(x).sharding.spec[1:]))
        x = jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
    return jax.reshard(x, jax.P(*(None for _ in x.shape)))
