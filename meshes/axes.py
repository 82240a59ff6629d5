"""Mesh axes and the shape of a device mesh.

The standard axes run from the least to the most communication-hungry, so that the last ones land
on the fastest links. All of them are always present, with size 1 when unused: no code asks whether
an axis exists. A scheme that needs axes of its own subclasses `MeshShape` with further fields.
"""

import dataclasses
import math

PIPELINE = "pipeline"
DATA = "data"
EXPERT = "expert"
FSDP = "fsdp"
SEQ = "seq"
TENSOR = "tensor"

FILL = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the mesh axes, in mesh order; each field is an axis.

    At most one axis may be -1: it takes the devices that the others leave.

    Raises:
        ValueError: an axis is neither positive nor -1, or two axes are -1.
    """

    pipeline: int = 1
    data: int = 1
    expert: int = 1
    fsdp: int = 1
    seq: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != FILL):
                raise ValueError(
                    f"mesh axis {axis!r} is {size!r}; expected a positive integer, or -1 for "
                    "the devices that the other axes leave"
                )
        fills = [axis for axis, size in self.sizes.items() if size == FILL]
        if len(fills) > 1:
            raise ValueError(f"mesh axes {fills} are all -1; at most one axis may be -1")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, in mesh order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def num_devices(self) -> int:
        """Product of the axes; of the known ones only, if one is still -1."""
        return math.prod(size for size in self.sizes.values() if size != FILL)

    def resolve(self, num_devices: int) -> "MeshShape":
        """Return the shape with -1 replaced, checked against the number of devices.

        Args:
            num_devices: devices to lay out.

        Raises:
            ValueError: the product of the axes is not the number of devices.
        """
        known = self.num_devices
        fill = next((axis for axis, size in self.sizes.items() if size == FILL), None)
        if fill is not None and num_devices % known == 0:
            return dataclasses.replace(self, **{fill: num_devices // known})
        if fill is not None or known != num_devices:
            wide = {axis: size for axis, size in self.sizes.items() if size != 1}
            raise ValueError(
                f"mesh {wide or '(all axes 1)'} multiplies to {known}, but there are "
                f"{num_devices} devices; make the product {num_devices}, or set one axis to -1"
            )
        return self
