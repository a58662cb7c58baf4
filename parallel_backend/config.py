"""Degrees of parallelism and how a model is to be loaded: frozen, validated once, before any process starts."""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .device_names import device_kind, on_ray

AXES = ("batch", "pipe", "patch", "ring", "ulysses", "tensor")
"""Mesh axes, outer to inner. The rank number counts them in this order."""

SEQUENCE_AXES = ("patch", "ring", "ulysses")
"""The axes that cut one stage's tokens; neighbours in AXES, so that a stage's sequence ranks are counted through."""

WIDGETS = {
    "batch": "split_batch_degree",
    "pipe": "pipefusion_degree",
    "patch": "patch_degree",
    "ring": "ring_degree",
    "ulysses": "ulysses_degree",
    "tensor": "tensor_parallel_degree",
}
"""Axis -> the widget that sets its degree: every message for the user names the widget."""

PATCH_MODES = ("none", "displaced", "naive")
"""What the patch axis does: DistriFusion (arXiv 2402.19481) keeps other bands' keys a step old, naive never sees them."""

FLASH_CAPABILITY = (8, 0)
"""CUDA devices from Ampere on have what flash attention needs."""

TRANSFER_DTYPES = ("full", "int8", "fp8")
"""How Ulysses' transfers carry values: as they are computed with, or in one byte each (compression.py)."""

MOST_RANKS = 64

DTYPES = ("default", "fp32", "bf16", "fp16", "fp8_e4m3fn")


@dataclass(frozen=True)
class Degrees:
    """How many ranks each mesh axis has. The product is the number of ranks (devices).

    This and `check_model` are the one place that says which degrees do not combine, and why.
    """

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
                raise ValueError(f"{WIDGETS[axis]} is {degree}; the smallest degree is 1.")
        if self.patch_mode not in PATCH_MODES:
            raise ValueError(f"patch_mode is '{self.patch_mode}'; it is one of {', '.join(PATCH_MODES)}.")
        if self.patch > 1 and self.patch_mode == "none":
            raise ValueError(
                f"patch_degree is {self.patch}, but patch_mode is 'none'. Set patch_mode to 'displaced', or patch_degree "
                "to 1."
            )
        if self.patch > 1 and self.pipe > 1:
            raise ValueError(
                f"patch_degree is {self.patch} and pipefusion_degree is {self.pipe}: they do not combine, since patches "
                "need all blocks on every GPU and PipeFusion gives each GPU a share of the blocks. Set one of them to 1."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def sequence(self) -> int:
        """Ranks that share one stage's tokens."""
        return math.prod(getattr(self, axis) for axis in SEQUENCE_AXES)

    @property
    def displaced(self) -> bool:
        return self.patch > 1 and self.patch_mode == "displaced"

    @property
    def naive(self) -> bool:
        return self.patch > 1 and self.patch_mode == "naive"

    def coordinate(self, rank: int) -> "Coordinate":
        """Position of `rank` on each axis."""
        index, values = rank, {}
        for axis in reversed(AXES):
            index, values[axis] = divmod(index, getattr(self, axis))
        return Coordinate(**values)

    def ranks(self, batch: int, pipe: int, sequence: int) -> range:
        """The ranks of the tensor axis that share stage `pipe` of replica `batch` at this place among its sequence ranks."""
        first = ((batch * self.pipe + pipe) * self.sequence + sequence) * self.tensor
        return range(first, first + self.tensor)

    def sequence_index(self, at: "Coordinate") -> int:
        """Place of a rank among the sequence ranks of its stage."""
        index = 0
        for axis in SEQUENCE_AXES:
            index = index * getattr(self, axis) + getattr(at, axis)
        return index

    def __str__(self) -> str:
        named = [f"{WIDGETS[axis]} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(named) or "one rank"


@dataclass(frozen=True)
class Coordinate:
    """Where a rank stands on each mesh axis, counted from 0."""

    batch: int = 0
    pipe: int = 0
    patch: int = 0
    ring: int = 0
    ulysses: int = 0
    tensor: int = 0


def factors(world: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `world` as a product of `axes` numbers."""
    if axes == 1:
        yield (world,)
        return
    for first in range(1, world + 1):
        if world % first == 0:
            yield from ((first, *rest) for rest in factors(world // first, axes - 1))


def check_ranks(degrees: Degrees) -> None:
    """Raise ValueError for more ranks than anybody has devices: each is a process."""
    if degrees.world > MOST_RANKS:
        raise ValueError(
            f"{degrees} makes {degrees.world} ranks, of which {MOST_RANKS} are the most. Lower the degrees: their product "
            "is the number of devices."
        )


def check_devices(degrees: Degrees, devices: tuple[str, ...]) -> None:
    """Raise ValueError unless there is one device per rank."""
    if len(devices) != degrees.world:
        raise ValueError(
            f"devices names {len(devices)} ({', '.join(devices)}), but {degrees} needs {degrees.world}: the product of "
            "the degrees must equal the number of devices. Change the degrees, or the devices widget."
        )


def check_model(
    degrees: Degrees, *, heads: int, blocks: int, key_heads: int | None = None, unsupported: tuple[str, ...] = ()
) -> None:
    """Raise ValueError, naming the widget, if a model with that many attention heads and blocks cannot be cut so.

    `key_heads`: None for as many as `heads`. `unsupported`: axes that the model's kind cannot be cut along.
    """
    for axis in unsupported:
        if getattr(degrees, axis) > 1:
            instead = " or ".join(WIDGETS[other] for other in ("ulysses", "ring", "batch") if other not in unsupported)
            raise ValueError(
                f"{WIDGETS[axis]} is {getattr(degrees, axis)}, but this kind of model cannot be cut so. Set it to 1 and use "
                f"{instead}."
            )
    if degrees.pipe > blocks:
        raise ValueError(
            f"pipefusion_degree is {degrees.pipe}, but this model has {blocks} transformer blocks: a stage needs at "
            f"least one. Use pipefusion_degree <= {blocks}."
        )
    if degrees.tensor > (whole := key_heads or heads):
        kind = "attention heads" if whole == heads else "groups of attention heads"
        raise ValueError(
            f"tensor_parallel_degree is {degrees.tensor}, but this model has {whole} {kind}: each GPU needs at least one. "
            f"Use tensor_parallel_degree <= {whole}."
        )
    fewest = whole // degrees.tensor * (heads // whole)  # heads that a rank of the tensor axis has
    if degrees.ulysses > fewest:
        raise ValueError(
            f"ulysses_degree is {degrees.ulysses}, but this model has {heads} attention heads"
            + (f", {fewest} for each of tensor_parallel_degree {degrees.tensor}" if degrees.tensor > 1 else "")
            + f": each GPU needs at least one. Use ulysses_degree <= {fewest}; ring_degree has no such "
            "limit."
        )


def resolve_dtype(name: str, stored: str, devices: tuple[str, ...]) -> str:
    """What weight_dtype `default` means: fp32 where ranks are CPUs, else what the file has (fp32 for anything unusual)."""
    if name != "default":
        return name
    if not all(device_kind(device) == "cuda" for device in devices):
        return "fp32"
    return stored if stored in DTYPES else "fp32"


def flash_possible(device: str, dtype: str) -> bool:
    """flash-attn is installed and can serve a rank on `device` that computes in `dtype`."""
    return (
        device.startswith("cuda")
        and dtype in ("bf16", "fp16", "fp8_e4m3fn")
        and bool(importlib.util.find_spec("flash_attn"))
        and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
    )


def check_attention(attention: str, devices: tuple[str, ...], dtype: str) -> None:
    """Raise ValueError if the user insists on flash-attn where it cannot run. What a Ray cluster's GPUs can is not known."""
    known = [device for device in devices if not (on_ray(device) and device_kind(device) == "cuda")]
    if attention == "flash" and not all(flash_possible(device, dtype) for device in known):
        raise ValueError(
            "attention is 'flash', but flash-attn needs to be installed, and CUDA devices with bf16 or fp16 weights "
            f"(these are {', '.join(devices)} with {dtype}). Use 'auto' or 'sdpa'."
        )
