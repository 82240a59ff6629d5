"""Sharding as data: one table from logical names to mesh axes.

A parameter or an activation names its dimensions (`embed`, `act_seq`, ...); the table says over
which mesh axes each name is split. A new strategy is a new table, never new layer code. Every
translation is checked, and fails with the name, the value and what would do.
"""

import dataclasses
from collections.abc import Mapping, Sequence

Axes = tuple[str, ...]

# Weights and activations never share a name: FSDP splits one and not the other.
PARAMETER_NAMES = (
    "layers", "vocab", "embed", "q_heads", "kv_heads", "head_dim", "mlp", "experts", "norm",
)  # fmt: skip
ACTIVATION_NAMES = (
    "act_batch", "act_seq", "act_kv_seq", "act_residual_seq", "act_embed", "act_heads",
    "act_kv_heads", "act_mlp", "act_vocab", "act_experts",
)  # fmt: skip
STANDARD_NAMES = PARAMETER_NAMES + ACTIVATION_NAMES


@dataclasses.dataclass(frozen=True)
class Rules:
    """Immutable table: logical name -> mesh axes, major to minor; () means replicated.

    Attributes:
        table: pairs (logical name, mesh axes), one pair a name.

    Raises:
        ValueError: a name stands twice, or names one axis twice.
    """

    table: tuple[tuple[str, Axes], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.table]
        for name, axes in self.table:
            if names.count(name) > 1:
                raise ValueError(f"rules name {name!r} twice; keep one row for each logical name")
            if len(set(axes)) != len(axes):
                raise ValueError(f"rule {name!r} -> {axes} uses a mesh axis twice")

    @classmethod
    def of(cls, **axes: str | Sequence[str] | None) -> "Rules":
        """Build a table; names of `STANDARD_NAMES` left out are replicated."""
        return cls(tuple((name, ()) for name in STANDARD_NAMES)).replace(**axes)

    def replace(self, **axes: str | Sequence[str] | None) -> "Rules":
        """Return the table with some names remapped.

        Raises:
            ValueError: the table does not know a name; see `extend`.
        """
        for name in axes:
            self.axes(name)
        return Rules(tuple((dict(self.table) | _rows(axes)).items()))

    def extend(self, **axes: str | Sequence[str] | None) -> "Rules":
        """Return the table with names added: those of a paper.

        Raises:
            ValueError: the table has a name already.
        """
        for name, _ in self.table:
            if name in axes:
                raise ValueError(f"rules name {name!r} is already in the table; use replace")
        return Rules(self.table + tuple(_rows(axes).items()))

    def axes(self, name: str | None) -> Axes:
        """Mesh axes of one logical name; None is replicated.

        Raises:
            ValueError: the table does not know the name.
        """
        if name is None:
            return ()
        for known, axes in self.table:
            if known == name:
                return axes
        known_names = ", ".join(known for known, _ in self.table)
        raise ValueError(f"unknown logical name {name!r}; the rules know {known_names}")

    @property
    def used_axes(self) -> frozenset[str]:
        return frozenset(axis for _, axes in self.table for axis in axes)

    @staticmethod
    def check_axes(name: str | None, axes: Axes, sizes: Mapping[str, int]) -> None:
        """Raise ValueError if a row names an axis that the mesh does not have."""
        for axis in axes:
            if axis not in sizes:
                raise ValueError(
                    f"rule {name!r} -> {axes} names the mesh axis {axis!r}, but the mesh has "
                    f"{', '.join(sizes)}"
                )

    def split(
        self,
        names: Sequence[str | None],
        sizes: Mapping[str, int],
        shape: Sequence[int] | None = None,
        what: str = "array",
    ) -> tuple[Axes, ...]:
        """Translate logical names into the mesh axes of each dimension.

        Axes of size 1 are left out, so that the answer shows just what is split.

        Args:
            names: a logical name, or None, for each dimension.
            sizes: mesh axis -> size.
            shape: global shape, to check that each dimension divides; None skips that.
            what: what the array is called in an error.

        Raises:
            ValueError: unknown name or axis, an axis used by two dimensions, a number of names
                that is not the rank, or a dimension that its axes do not divide.
        """
        if shape is not None and len(shape) != len(names):
            raise ValueError(f"{what}: {len(names)} logical names {tuple(names)} for {shape}")
        entries: list[Axes] = []
        owner: dict[str, str | None] = {}
        for dim, name in enumerate(names):
            axes = self.axes(name)
            self.check_axes(name, axes, sizes)
            axes = tuple(axis for axis in axes if sizes[axis] > 1)
            for axis in axes:
                if axis in owner:
                    raise ValueError(
                        f"{what}: logical names {owner[axis]!r} and {name!r} both map to the mesh "
                        f"axis {axis!r}, which can split only one dimension of an array; change "
                        "one of the two rules"
                    )
                owner[axis] = name
            ways = 1
            for axis in axes:
                ways *= sizes[axis]
            if shape is not None and shape[dim] % ways:
                raise ValueError(_indivisible(what, name, shape[dim], axes, sizes, ways))
            entries.append(axes)
        return tuple(entries)


def _rows(axes: Mapping[str, str | Sequence[str] | None]) -> dict[str, Axes]:
    return {
        name: (value,) if isinstance(value, str) else tuple(value or ())
        for name, value in axes.items()
    }


def _indivisible(
    what: str, name: str | None, size: int, axes: Axes, sizes: Mapping[str, int], ways: int
) -> str:
    split = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
    divisors = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
    multiple = -(-size // ways) * ways
    return (
        f"{what}: dimension {name!r} of size {size} does not divide over {split}; these axes "
        f"would do with a product among {divisors[:16]}, or the dimension with size {multiple}, "
        f"or map {name!r} to no axis"
    )
