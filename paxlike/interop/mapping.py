"""Parameters under another codebase's names and layouts: rows of a table, and what applies them.

A row says their name, our path, and the layout of both in letters. `(n h) d -> d n h` is their
matrix, whose rows are the dims of all heads, and our array of three dimensions; a digit is a dim of
that size. `{layer}` and `{expert}` in their name stand for our leading dimensions, which they keep
in tensors of their own. Nothing here knows a file or a device: tensors are read through a function,
just the rows that an index needs.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

Index = tuple[slice, ...]
Shape = tuple[int, ...]
Groups = tuple[tuple[str, ...], ...]

# Placeholders of their names, in the order of our leading dimensions.
PLACEHOLDERS = ("layer", "expert")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        theirs: their name, with `{layer}` and `{expert}`.
        ours: our path, as in `layers/attention/query`.
        layout: their dims and ours, without the dimensions of the placeholders.
    """

    theirs: str
    ours: str
    layout: str

    @property
    def stacked(self) -> tuple[str, ...]:
        """Placeholders of the name."""
        return tuple(name for name in PLACEHOLDERS if f"{{{name}}}" in self.theirs)

    def name(self, numbers: Sequence[int]) -> str:
        """Their name of one tensor; a number for each placeholder."""
        return self.theirs.format(**dict(zip(self.stacked, numbers, strict=True)))


Table = tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """One of their tensors as a part of one of our parameters.

    Attributes:
        name: their name.
        row: of the table.
        numbers: layer and expert, as far as the row has them.
        our_shape: shape of the part, without the dimensions of layer and expert.
    """

    name: str
    row: Row
    numbers: tuple[int, ...]
    our_shape: Shape

    @property
    def their_shape(self) -> Shape:
        sizes, (theirs, _) = self._sizes(), _sides(self.row.layout)
        return tuple(math.prod(sizes[letter] for letter in group) for group in theirs)

    def to_ours(self, x: np.ndarray) -> np.ndarray:
        """Their tensor in our layout."""
        return self.read(lambda index: x[index], tuple(slice(None) for _ in self.our_shape))

    def to_theirs(self, x: np.ndarray) -> np.ndarray:
        """Our array in their layout, contiguous."""
        sizes, (theirs, ours) = self._sizes(), _sides(self.row.layout)
        letters, order = _flat(ours), _flat(theirs)
        x = x.reshape([sizes[letter] for letter in letters])
        x = x.transpose([letters.index(letter) for letter in order])
        return np.ascontiguousarray(x.reshape(self.their_shape))

    def read(self, read: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
        """Read a slice of ours, asking for no more of theirs than its rows and columns.

        Args:
            read: gives a slice of their tensor.
            index: a slice of each of our dimensions, step 1.
        """
        sizes, (theirs, ours) = self._sizes(), _sides(self.row.layout)
        bounds = [s.indices(n)[:2] for s, n in zip(index, self.our_shape, strict=True)]
        rest = [slice(*bound) for bound in bounds]
        wanted: list[slice] = []
        for group in theirs:
            first, inner = group[0], math.prod(sizes[letter] for letter in group[1:])
            start, stop = 0, sizes[first]
            if (first,) in ours:
                dim = ours.index((first,))
                start, stop = bounds[dim]
                rest[dim] = slice(None)
            sizes[first] = stop - start
            wanted.append(slice(start * inner, stop * inner))
        letters = _flat(theirs)
        x = read(tuple(wanted)).reshape([sizes[letter] for letter in letters])
        x = x.transpose([letters.index(letter) for letter in _flat(ours)])
        x = x.reshape([math.prod(sizes[letter] for letter in group) for group in ours])
        return x[tuple(rest)]

    def _sizes(self) -> dict[str, int]:
        """Letter -> size; the letters of our dims give them, digits their own."""
        sizes: dict[str, int] = {}
        for group, size in zip(_sides(self.row.layout)[1], self.our_shape, strict=True):
            sizes |= {digit: int(digit) for digit in group if digit.isdigit()}
            known = math.prod(int(digit) for digit in group if digit.isdigit())
            sizes |= {letter: size // known for letter in group if not letter.isdigit()}
        return sizes


def parts(table: Table, shapes: Mapping[str, Shape]) -> Iterator[Part]:
    """Every tensor of theirs that makes up parameters of these shapes.

    Rows of parameters that the model does not have are left out.

    Args:
        table: of the family.
        shapes: path -> shape of each of our parameters.

    Raises:
        ValueError: a parameter that no row names.
    """
    unknown = shapes.keys() - {row.ours for row in table}
    if unknown:
        raise ValueError(
            f"the other format has no tensor for our parameter {', '.join(sorted(unknown))}; the "
            "model has an option that this family lacks"
        )
    for row in table:
        if row.ours in shapes:
            shape = shapes[row.ours]
            stacked, rest = shape[: len(row.stacked)], shape[len(row.stacked) :]
            for numbers in itertools.product(*map(range, stacked)):
                yield Part(row.name(numbers), row, numbers, rest)


@functools.cache
def _sides(layout: str) -> tuple[Groups, Groups]:
    theirs, _, ours = layout.partition("->")
    return _groups(theirs), _groups(ours)


def _groups(side: str) -> Groups:
    found = re.findall(r"\(([^)]*)\)|(\S+)", side)
    return tuple(tuple((group or letter).split()) for group, letter in found)


def _flat(groups: Groups) -> list[str]:
    """Letters in order; a dim of size 1 has no counterpart on the other side, and no place here."""
    return [letter for group in groups for letter in group if letter != "1"]
