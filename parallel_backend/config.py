"""Degrees of parallelism and how a model is to be loaded: frozen, validated once, before any process starts."""

import importlib.util
import math
from dataclasses import dataclass

AXES = ("batch", "pipe", "ring", "ulysses", "tensor")
"""Mesh axes, outer to inner. The rank number counts them in this order."""

WIDGETS = {
    "batch": "split_batch_degree",
    "pipe": "pipefusion_degree",
    "ring": "ring_degree",
    "ulysses": "ulysses_degree",
    "tensor": "tensor_parallel_degree",
}
"""Axis -> the widget that sets its degree: every message for the user names the widget."""

UNAVAILABLE = ("ring", "tensor")
"""Axes that have their place in the mesh and no implementation yet."""

DTYPES = ("default", "fp32", "bf16", "fp16", "fp8_e4m3fn")


@dataclass(frozen=True)
class Degrees:
    """How many ranks each mesh axis has. The product is the number of ranks (devices)."""

    batch: int = 1
    pipe: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    def __post_init__(self):
        for axis in AXES:
            degree = getattr(self, axis)
            if degree < 1:
                raise ValueError(f"{WIDGETS[axis]} is {degree}; the smallest degree is 1.")
            if degree > 1 and axis in UNAVAILABLE:
                raise ValueError(f"{WIDGETS[axis]} is {degree}; this version supports only 1 for it.")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    def coordinate(self, rank: int) -> "Coordinate":
        """Position of `rank` on each axis."""
        index, values = rank, {}
        for axis in reversed(AXES):
            index, values[axis] = divmod(index, getattr(self, axis))
        return Coordinate(**values)

    def rank(self, **index: int) -> int:
        """Rank at the given position; axes not named are 0."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + index.get(axis, 0)
        return rank

    def __str__(self) -> str:
        named = [f"{WIDGETS[axis]} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(named) or "one rank"


@dataclass(frozen=True)
class Coordinate:
    """Where a rank stands on each mesh axis, counted from 0."""

    batch: int = 0
    pipe: int = 0
    ring: int = 0
    ulysses: int = 0
    tensor: int = 0


def check_devices(degrees: Degrees, devices: tuple[str, ...]) -> None:
    """Raise ValueError unless there is one device per rank."""
    if len(devices) != degrees.world:
        raise ValueError(
            f"devices names {len(devices)} ({', '.join(devices)}), but {degrees} needs {degrees.world}: the product of "
            "the degrees must equal the number of devices. Change the degrees, or the devices widget."
        )


def check_model(degrees: Degrees, *, heads: int, blocks: int) -> None:
    """Raise ValueError, naming the widget, if a model with that many attention heads and blocks cannot be cut so."""
    if degrees.pipe > blocks:
        raise ValueError(
            f"pipefusion_degree is {degrees.pipe}, but this model has {blocks} transformer blocks: a stage needs at "
            f"least one. Use pipefusion_degree <= {blocks}."
        )
    if heads % degrees.ulysses:
        fit = [d for d in range(1, heads + 1) if heads % d == 0 and d <= 8]
        raise ValueError(
            f"ulysses_degree is {degrees.ulysses}, but this model has {heads} attention heads, which it must divide. "
            f"Degrees that fit: {', '.join(map(str, fit))}."
        )


def resolve_dtype(name: str, stored: str, devices: tuple[str, ...]) -> str:
    """What weight_dtype `default` means: fp32 where ranks are CPUs, else what the file has (fp32 for anything unusual)."""
    if name != "default":
        return name
    if not all(device.startswith("cuda") for device in devices):
        return "fp32"
    return stored if stored in DTYPES else "fp32"


def flash_possible(device: str, dtype: str) -> bool:
    """flash-attn is installed and can serve a rank on `device` that computes in `dtype`."""
    return (
        device.startswith("cuda")
        and dtype in ("bf16", "fp16", "fp8_e4m3fn")
        and bool(importlib.util.find_spec("flash_attn"))
    )


def check_attention(attention: str, devices: tuple[str, ...], dtype: str) -> None:
    """Raise ValueError if the user insists on flash-attn where it cannot run."""
    if attention == "flash" and not all(flash_possible(device, dtype) for device in devices):
        raise ValueError(
            "attention is 'flash', but flash-attn needs to be installed, and CUDA devices with bf16 or fp16 weights "
            f"(these are {', '.join(devices)} with {dtype}). Use 'auto' or 'sdpa'."
        )
