"""The whole sharding of a model on one screen, and the promise of a strategy held against it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from meshes.context import Parallelism, current
from meshes.presets import SHARDS_PARAMETERS
from paxlike.checkpoint import flatten

# Norms and biases may stay whole where a strategy claims to shard; more than this may not.
MOST_REPLICATED = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one parameter lies.

    Attributes:
        path: its name, as in checkpoints.
        shape: global shape.
        names: logical name of each dimension.
        split: mesh axes of each dimension, those of size 1 left out.
        dtype: its type, by name.
        bytes_per_device: what one device holds.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    split: tuple[tuple[str, ...], ...]
    dtype: str
    bytes_per_device: int

    @property
    def axes(self) -> frozenset[str]:
        """All mesh axes that split it."""
        return frozenset(axis for axes in self.split for axis in axes)


def placements(params: Any) -> list[Placement]:
    """Place each parameter under the active parallelism.

    Args:
        params: parameters or their shapes, as `Model.abstract()` gives them.
    """
    par = current()
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    rows = []
    for (path, leaf), variable in zip(flatten(params).items(), variables, strict=True):
        names = tuple(variable.get_metadata()["out_sharding"])
        split = par.rules.split(names, par.sizes, leaf.shape, path)
        ways = math.prod(par.sizes[axis] for axes in split for axis in axes)
        rows.append(
            Placement(
                path=path,
                shape=tuple(leaf.shape),
                names=names,
                split=split,
                dtype=leaf.dtype.name,
                bytes_per_device=leaf.size * leaf.dtype.itemsize // ways,
            )
        )
    return rows


def describe(params: Any) -> str:
    """Format every parameter's shape, logical names, layout and bytes per device, with totals."""
    rows = placements(params)
    table = [("parameter", "shape", "logical names", "split over", "bytes/device")]
    for row in rows:
        split = ", ".join("+".join(axes) or "-" for axes in row.split)
        names = ", ".join(name or "-" for name in row.names)
        shape = " x ".join(map(str, row.shape))
        table.append((row.path, shape, names, split, f"{row.bytes_per_device:,}"))
    count = sum(math.prod(row.shape) for row in rows)
    held = sum(row.bytes_per_device for row in rows)
    table.append((f"total: {count:,} parameters", "", "", "", f"{held:,}"))
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1].rjust(widths[-1])]))
    wide = {axis: size for axis, size in current().sizes.items() if size > 1}
    mesh = " x ".join(f"{axis} {size}" for axis, size in wide.items()) or "one device"
    return "\n".join([f"mesh: {mesh}", *lines])


def check_promise(params: Any, preset: str) -> None:
    """Hold a strategy to its claim that parameters are split.

    Args:
        params: parameters or their shapes.
        preset: name of the rule table.

    Raises:
        ValueError: more than 2 % of the parameter bytes are whole over an axis that the strategy
            claims to split them over; the message names the largest ones.
    """
    par = current()
    rows = placements(params)
    total = sum(_bytes(row) for row in rows)
    for axis in SHARDS_PARAMETERS.get(preset, ()):
        if par.sizes.get(axis, 1) == 1:
            continue
        whole = sorted((row for row in rows if axis not in row.axes), key=_bytes, reverse=True)
        if sum(map(_bytes, whole)) > MOST_REPLICATED * total:
            raise ValueError(_broken_promise(par, preset, axis, whole, total))


def _broken_promise(
    par: Parallelism, preset: str, axis: str, whole: Sequence[Placement], total: int
) -> str:
    share = sum(map(_bytes, whole)) / total
    largest = ", ".join(f"{row.path} {row.names}" for row in whole[:3])
    return (
        f"rules {preset!r} claim to split parameters over {axis}={par.sizes[axis]}, but "
        f"{share:.1%} of their bytes stay whole on each device (at most {MOST_REPLICATED:.0%} "
        f"may): {largest}; map one of their logical names to {axis!r}, or set the axis to 1"
    )


def _bytes(row: Placement) -> int:
    return math.prod(row.shape) * jax.numpy.dtype(row.dtype).itemsize
