"""Changes of one widget that make a run fit, found by the same memory model that refused it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.core.validate import all_degrees

from .balance import equally_full, stage_ranks, stages_by_size
from .memory_model import Request, bytes_by_block, memory_by_rank
from .model_sizes import ModelSizes, model_sizes, weights_by_rank

RANKS_TRIED = 16
WAYS = 2
"""Maximum number of degrees that a message names."""


@dataclass(frozen=True)
class Capacity:
    """Bytes that ranks may fill, weights included.

    `by_rank`: on each rank's device. Additional devices count as the smallest of them. `together`: all ranks share one
    memory, and `by_rank` are equal shares of it. `streams`: blocks may be streamed from host memory.
    """

    by_rank: tuple[float, ...]
    together: bool
    streams: bool = False

    def holds(self, sizes: list[int]) -> bool:
        """Whether ranks that need these `sizes` in bytes fit."""
        if self.together:
            return sum(sizes) <= sum(self.by_rank)
        limits = [*self.by_rank, *[min(self.by_rank)] * (len(sizes) - len(self.by_rank))]
        return all(size <= limit for size, limit in zip(sizes, limits, strict=False))


def changes(
    checkpoint: Checkpoint,
    setup: Setup,
    sizes: ModelSizes,
    spans: tuple[Span, ...],
    requests: tuple[Request, ...],
    capacity: Capacity,
    devices: int,
) -> list[str]:
    """Return each change, as the widget's name and value. Empty if no single change helps. `spans`: the blocks of each stage
    at present. `devices`: number of devices of this machine."""
    if not capacity.by_rank:
        return []
    degrees = setup.degrees

    def fit(changed: tuple[Request, ...]) -> bool:
        return fits(sizes, degrees, spans, changed, capacity)

    ways = [str(other) for other in _degrees(sizes, degrees, requests, capacity, devices)]
    if (split := _stages_that_fit(sizes, degrees, spans, requests, capacity)) is not None:
        ways.append(f"stage_split {','.join(str(len(span)) for span in split)}")
    if not setup.dtype.startswith("fp8"):
        packed = model_sizes(checkpoint, "fp8_e4m3fn", setup.devices[0])
        if fits(packed, degrees, spans, requests, capacity) and not fit(requests):
            ways.append("weight_dtype fp8_e4m3fn")
    if not requests:
        return ways
    largest = max(requests, key=lambda request: request.image * request.entries)
    rows = largest.grid[-2]
    side = _largest(rows, lambda count: fit(tuple(_with_rows(request, count / rows) for request in requests)))
    if side:
        ways.append(f"an image {side / rows:.2f} times as wide and high")
    if len(largest.grid) == 3:
        frames = largest.grid[0]
        count = _largest(frames, lambda count: fit(tuple(_with_frames(request, count / frames) for request in requests)))
        if count:
            ways.append(f"{count} latent frames instead of {frames}")
    # Two entries may be one image's two prompts.
    if largest.entries > 2 and fit(tuple(replace(request, entries=min(2, request.entries)) for request in requests)):
        ways.append("batch_size 1")
    if any(request.kept > 1 for request in requests) and fit(
        tuple(replace(request, kept=min(1, request.kept)) for request in requests)
    ):
        ways.append("extrapolate off")
    return ways


def fits(
    sizes: ModelSizes, degrees: Degrees, spans: tuple[Span, ...], requests: tuple[Request, ...], capacity: Capacity
) -> bool:
    """Whether all ranks fit with these stages."""
    needs = [need.total for need in memory_by_rank(sizes, degrees, spans, requests)]
    if capacity.streams:
        weights = weights_by_rank(sizes, degrees, spans)
        needs = [need - (one.total - one.least) for need, one in zip(needs, weights, strict=True)]
    return capacity.holds(needs)


def _degrees(
    sizes: ModelSizes, degrees: Degrees, requests: tuple[Request, ...], capacity: Capacity, devices: int
) -> list[Degrees]:
    """Degrees that fit, nearest to the present ones first: few widgets to change, few devices, stages before the rest."""
    fitting = []
    for world in range(1, min(devices, RANKS_TRIED) + 1):
        for other in all_degrees(world):
            if other.patch > 1 or other.sizes == degrees.sizes:
                continue
            try:
                sizes.check(other)
            except ValueError:
                continue
            if fits(sizes, other, stages_by_size(bytes_by_block(sizes, other, requests), other.pipe), requests, capacity):
                fitting.append(other)
    changed = lambda other: sum(one != two for one, two in zip(other.sizes, degrees.sizes, strict=True))  # noqa: E731
    fitting.sort(key=lambda other: (changed(other), other.world, -other.pipe, -other.ulysses))
    chosen: dict[tuple[str, ...], Degrees] = {}
    for other in fitting:  # one for each set of widgets is enough
        chosen.setdefault(tuple(axis for axis in AXES if getattr(other, axis) > getattr(degrees, axis)), other)
    return list(chosen.values())[:WAYS]


def _stages_that_fit(
    sizes: ModelSizes, degrees: Degrees, spans: tuple[Span, ...], requests: tuple[Request, ...], capacity: Capacity
) -> tuple[Span, ...] | None:
    """Return the cut into stages, with the same degrees, that fills all devices equally. None if it does not fit or is
    `spans`."""
    if capacity.together or degrees.pipe == 1 or len(capacity.by_rank) != degrees.world:
        return None
    limits = [min(capacity.by_rank[rank] for rank in ranks) for ranks in stage_ranks(degrees)]
    other_spans = equally_full(limits, bytes_by_block(sizes, degrees, requests))
    return other_spans if other_spans != spans and fits(sizes, degrees, other_spans, requests, capacity) else None


def _largest(below: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number below `below` that fits, if all smaller ones fit too; 0 if none does."""
    low, high = 0, below - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _with_rows(request: Request, share: float) -> Request:
    rows, columns = (max(1, round(share * side)) for side in request.grid[-2:])
    return replace(request, grid=(*request.grid[:-2], rows, columns))


def _with_frames(request: Request, share: float) -> Request:
    return replace(request, grid=(max(1, round(share * request.grid[0])), *request.grid[1:]))
