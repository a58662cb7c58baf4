"""Degrees of parallelism: how many ranks each mesh axis has. Checked before any process starts."""

import math
from dataclasses import dataclass

AXES = ("batch", "pipe", "patch", "ring", "ulysses", "tensor")
"""Mesh axes, outer to inner. Rank numbers count along the last axis first."""

SEQUENCE_AXES = ("patch", "ring", "ulysses")
"""Axes that split the tokens of a stage. They are adjacent in AXES, so the sequence ranks of a stage are consecutive."""

WIDGETS = {
    "batch": "split_batch_degree",
    "pipe": "pipefusion_degree",
    "patch": "patch_degree",
    "ring": "ring_degree",
    "ulysses": "ulysses_degree",
    "tensor": "tensor_parallel_degree",
}
"""Axis -> widget that sets its degree."""

PATCH_MODES = ("none", "displaced", "naive")
"""Keys of other patches that attention uses. naive: none. displaced: those of the last step (DistriFusion, arXiv
2402.19481)."""

TRANSFER_DTYPES = ("full", "int8", "fp8", "residual")
"""Encoding of transfers. full: the compute dtype. int8, fp8: one byte a value under Ulysses (transfer_codec.py). residual:
displaced patches send the change since the last call (change_codec.py), and Ulysses uses int8."""

DTYPES = ("default", "fp32", "bf16", "fp16", "fp8_e4m3fn", "int8")


@dataclass(frozen=True)
class Degrees:
    """Number of ranks on each mesh axis. The product is the number of ranks, one for each device. Raises ValueError for
    degrees that do not combine. validate.check_model refuses degrees by which a model cannot be cut."""

    batch: int = 1
    pipe: int = 1
    patch: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    patch_mode: str = "none"

    def __post_init__(self):
        for axis in AXES:
            degree = getattr(self, axis)
            if degree < 1:
                raise ValueError(f"Set {WIDGETS[axis]} to 1 or more: it is {degree}.")
        if self.patch_mode not in PATCH_MODES:
            raise ValueError(f"Set patch_mode to one of {', '.join(PATCH_MODES)}: it is '{self.patch_mode}'.")
        if self.patch > 1 and self.patch_mode == "none":
            raise ValueError(
                f"Set patch_mode to 'displaced', or patch_degree to 1: patch_degree is {self.patch}, but patch_mode is "
                "'none'."
            )
        if self.patch > 1 and self.pipe > 1:
            raise ValueError(
                "Set patch_degree or pipefusion_degree to 1: they do not combine, because patches need all blocks on every "
                "GPU and PipeFusion gives each GPU a share of the blocks. "
                f"patch_degree is {self.patch} and pipefusion_degree is {self.pipe}."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def sequence(self) -> int:
        """Number of ranks that share the tokens of a stage."""
        return math.prod(getattr(self, axis) for axis in SEQUENCE_AXES)

    @property
    def displaced(self) -> bool:
        return self.patch > 1 and self.patch_mode == "displaced"

    @property
    def naive(self) -> bool:
        return self.patch > 1 and self.patch_mode == "naive"

    def coordinate(self, rank: int) -> "Coordinate":
        """Return the position of `rank` on each axis."""
        index, values = rank, {}
        for axis in reversed(AXES):
            index, values[axis] = divmod(index, getattr(self, axis))
        return Coordinate(**values)

    def ranks(self, batch: int, pipe: int, sequence: int) -> range:
        """Ranks of one tensor group: those of stage `pipe` in replica `batch` that are sequence rank `sequence`."""
        first = ((batch * self.pipe + pipe) * self.sequence + sequence) * self.tensor
        return range(first, first + self.tensor)

    def same_weights(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same weights as `rank`, which is included: those with its stage and tensor index."""
        places = map(self.coordinate, range(self.world))
        parts = [(at.pipe, at.tensor) for at in places]
        return tuple(other for other, its in enumerate(parts) if its == parts[rank])

    def sequence_index(self, at: "Coordinate") -> int:
        """Return the index of the rank at `at` among the sequence ranks of its stage."""
        index = 0
        for axis in SEQUENCE_AXES:
            index = index * getattr(self, axis) + getattr(at, axis)
        return index

    def __str__(self) -> str:
        named = [f"{WIDGETS[axis]} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(named) or "one rank"


@dataclass(frozen=True)
class Coordinate:
    """A rank's position on each mesh axis, from 0."""

    batch: int = 0
    pipe: int = 0
    patch: int = 0
    ring: int = 0
    ulysses: int = 0
    tensor: int = 0
