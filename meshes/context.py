"""The one place where a mesh and its rules are entered.

`parallelism(mesh, rules)` sets the JAX mesh, Flax's logical rules and this module's own record
together. Layers then ask by logical name: `spec`, `ways`, `reshard`; nothing else sets either.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax.core import spmd
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshes.rules import Axes, Rules


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """The active mesh and rules, with the schemes (values, not branches) that layers ask for.

    Attributes:
        mesh: a device mesh, or an abstract one for tracing without devices.
        rules: the table of logical names.
        schemes: how exact computations are carried out (`layers.schemes.Schemes`).
        remarks: what layers chose while they were traced, sentences for a report.
        kernels: name of each opaque program that they call -> what one run of it costs.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules
    schemes: Any = None
    remarks: list[str] = dataclasses.field(default_factory=list, compare=False, repr=False)
    kernels: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, axes in self.rules.table:
            self.rules.check_axes(name, axes, self.sizes)
        unused = [
            f"{axis}={size}"
            for axis, size in self.sizes.items()
            if size > 1 and axis not in self.rules.used_axes
        ]
        if unused:
            raise ValueError(
                f"mesh axes {', '.join(unused)} are larger than 1, but no rule uses them: every "
                "device along them would repeat the same work; map a logical name to them, choose "
                "rules that do, or set their size to 1"
            )

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))

    def remark(self, sentence: str) -> None:
        """Note a choice for the report, once."""
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    def axes(self, name: str | None) -> Axes:
        """Mesh axes larger than 1 over which a logical name is split."""
        return tuple(axis for axis in self.rules.axes(name) if self.sizes[axis] > 1)

    def axes_of(self, names: Sequence[str | None]) -> Axes:
        """Mesh axes larger than 1 that split any of these names, each once."""
        return tuple(dict.fromkeys(axis for name in names for axis in self.axes(name)))

    def ways(self, name: str | None) -> int:
        """Number of parts into which a logical name is split."""
        ways = 1
        for axis in self.axes(name):
            ways *= self.sizes[axis]
        return ways

    def spec(
        self,
        names: Sequence[str | None],
        shape: Sequence[int] | None = None,
        what: str = "array",
    ) -> PartitionSpec:
        """PartitionSpec of logical names on this mesh; checked as `Rules.split` says."""
        split = self.rules.split(names, self.sizes, shape, what)
        return PartitionSpec(*(axes if len(axes) > 1 else (*axes, None)[0] for axes in split))


_active: contextvars.ContextVar[Parallelism | None] = contextvars.ContextVar(
    "_active", default=None
)


@contextlib.contextmanager
def parallelism(
    mesh: Mesh | AbstractMesh, rules: Rules, schemes: Any = None
) -> Iterator[Parallelism]:
    """Enter a mesh and its rules together.

    Raises:
        ValueError: a mesh axis larger than 1 is used by no rule, or a rule names an axis that the
            mesh does not have.
    """
    entered = Parallelism(mesh, rules, schemes)
    flax_rules = tuple((name, entered.axes(name) or None) for name, _ in rules.table)
    abstract = isinstance(mesh, AbstractMesh)
    enter_mesh = jax.sharding.use_abstract_mesh(mesh) if abstract else jax.set_mesh(mesh)
    token = _active.set(entered)
    try:
        with enter_mesh, spmd.logical_axis_rules(flax_rules):
            yield entered
    finally:
        _active.reset(token)


def current() -> Parallelism:
    """Return the active parallelism.

    Raises:
        RuntimeError: none is entered.
    """
    entered = _active.get()
    if entered is None:
        raise RuntimeError("no mesh is entered; wrap the call in meshes.context.parallelism(...)")
    return entered


def spec(*names: str | None) -> PartitionSpec:
    """PartitionSpec of logical names under the active parallelism."""
    return current().spec(names)


def reshard(x: jax.Array, *names: str | None) -> jax.Array:
    """Move an array to the layout of its logical names: the visible change of layout."""
    target = current().spec(names, x.shape)
    return x if jax.typeof(x).sharding.spec == target else jax.reshard(x, target)
