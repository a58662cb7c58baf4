"""Checks of degrees, devices, dtypes and attention kernels against each other. Errors name the widget."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from .attention_kernels import ATTENTION, AUTO, KERNELS, known_devices, wanted
from .degrees import AXES, Degrees
from .devices import device_kind

MOST_RANKS = 64


def factors(world: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `world` as a product of `axes` numbers."""
    if axes == 1:
        yield (world,)
        return
    for first in range(1, world + 1):
        if world % first == 0:
            yield from ((first, *rest) for rest in factors(world // first, axes - 1))


def all_degrees(world: int) -> Iterator[Degrees]:
    """All degrees of `world` ranks that combine. Patches are displaced."""
    for sizes in factors(world, len(AXES)):
        named: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
        if named["patch"] == 1 or named["pipe"] == 1:
            yield Degrees(**named, patch_mode="displaced" if named["patch"] > 1 else "none")


def check_ranks(degrees: Degrees) -> None:
    """Raise ValueError for more than MOST_RANKS ranks."""
    if degrees.world > MOST_RANKS:
        raise ValueError(
            f"Lower the degrees to a product of at most {MOST_RANKS}: {degrees} makes {degrees.world} ranks, and each "
            "needs a device."
        )


def check_devices(degrees: Degrees, devices: tuple[str, ...], all_known: bool = True) -> None:
    """Raise ValueError unless there is one device per rank, and under Ulysses all are of one type.

    `all_known`: False if these degrees will be multiplied by others that are unknown yet. Under Ulysses a GPU rank exchanges
    heads in more parts than a CPU rank (HEAD_GROUPS), so mixed ranks would deadlock. No other transfer's order or size
    depends on the device.
    """
    if len(devices) % degrees.world or (all_known and len(devices) != degrees.world):
        needed = str(degrees.world) if all_known else f"a multiple of {degrees.world}"
        entries = "device" if needed == "1" else "devices"
        raise ValueError(
            f"Set devices to {needed} {entries}, or change the degrees: the product of the degrees must equal the number of "
            f"devices. devices names {len(devices)} ({', '.join(devices)}), but {degrees} needs {needed}."
        )
    if degrees.ulysses > 1 and _mixed(devices):
        raise ValueError(
            "Set devices to GPUs only, or to cpu once for each rank. Or set ulysses_degree to 1 and use another degree: "
            f"ulysses_degree {degrees.ulysses} runs on one kind only, but devices names GPUs and CPUs "
            f"({', '.join(devices)})."
        )


def check_one_kind(devices: Sequence[str]) -> None:
    """Raise ValueError for a mixture of GPUs and CPUs, for which the planner chooses no degrees."""
    if _mixed(devices):
        raise ValueError(
            "Set devices to GPUs only, or to cpu once for each rank: the best degrees cannot be found for GPUs and CPUs "
            f"together ({', '.join(devices)}), because ulysses_degree runs on one kind only."
        )


def _mixed(devices: Sequence[str]) -> bool:
    return len(set(map(device_kind, devices))) > 1


def check_model(
    degrees: Degrees,
    blocks: int,
    heads: int,
    head_units: int = 0,
    tensor_degrees: Collection[int] | None = None,
    file: str = "this file",
) -> None:
    """Raise ValueError, naming the widget, if a model with these numbers of blocks and attention heads cannot be cut by
    `degrees`.

    `head_units`: see OwnBlock. `tensor_degrees`: those by which quantised weights can be cut. None: all. `file`: the
    model's, for errors that lie in it.
    """
    if degrees.pipe > max(blocks, 1):
        raise ValueError(
            f"Set pipefusion_degree to {max(blocks, 1)} or less: it is {degrees.pipe}, but this model has {blocks} "
            "transformer blocks, and a stage needs at least one."
        )
    if degrees.tensor > (whole := head_units or heads):
        kind = "attention heads" if whole == heads else "groups of attention heads"
        raise ValueError(
            f"Set tensor_parallel_degree to {whole} or less: it is {degrees.tensor}, but this model has {whole} {kind}, "
            "and each GPU needs at least one."
        )
    if tensor_degrees is not None and degrees.tensor not in tensor_degrees:
        smaller = ", ".join(str(degree) for degree in sorted(tensor_degrees) if degree < degrees.tensor)
        raise ValueError(
            f"Set tensor_parallel_degree to one of {smaller}, and use other degrees for the other GPUs: "
            f"{degrees.tensor} cuts weights of {file} inside groups of values that are quantised together."
        )
    fewest = whole // degrees.tensor * (heads // whole)  # query heads of a rank on the tensor axis
    if degrees.ulysses > fewest:
        raise ValueError(
            f"Set ulysses_degree to {fewest} or less: it is {degrees.ulysses}, but this model has {heads} attention heads"
            + (f", {fewest} for each of tensor_parallel_degree {degrees.tensor}" if degrees.tensor > 1 else "")
            + ", and each GPU needs at least one. ring_degree has no such limit."
        )


def check_attention(attention: str, devices: Sequence[str], dtype: str) -> None:
    """Raise ValueError for a kernel that cannot run on these devices. Those of a Ray cluster are not checked."""
    if attention != AUTO and attention.removeprefix(f"{AUTO}/") not in KERNELS:
        raise ValueError(f"attention is '{attention}'; it is one of {', '.join(ATTENTION)}.")
    kernel, demanded = wanted(attention)
    if demanded and not all(kernel.possible(device, dtype) for device in known_devices(devices)):
        raise ValueError(
            f"attention is '{attention}', but {kernel.title} cannot run here: {kernel.needs} "
            f"(these are {', '.join(devices)} with {dtype}). Use 'auto' or 'sdpa'."
        )
