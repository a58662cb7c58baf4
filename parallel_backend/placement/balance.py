"""The blocks of each pipeline stage and the image's share of each patch rank, from measured costs or the user's text."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span
from parallel_backend.wire import messages as m

from .memory_model import USABLE_MEMORY, WEIGHTS_SHARE, Request
from .pipeline_model import StageCost

log = logging.getLogger(__name__)

ROUNDING = 1e-9
"""Sums of seconds count as equal if they differ by less than this fraction: the order of adding changes the last digits."""
ALIKE = 1.2
"""Devices whose times differ by less than this factor count as equally fast: the difference is noise."""
QUARTER = 0.25
"""Length of the shorter timed sequence, as a fraction of the longer one."""
CPU_ROWS = 32
"""Rows of image tokens with which CPU ranks time blocks. More rows of a large model would take minutes."""
GPU_ROWS = 32, 512
"""The fewest and the most rows for GPUs. Fewer do not fill a GPU, and more would take an old one many seconds."""


def cut_blocks(
    costs: Sequence[Sequence[float]], sizes: Sequence[int], capacities: Sequence[int | None], spill: Sequence[float] = ()
) -> tuple[Span, ...] | None:
    """Cut the blocks into consecutive non-empty spans, one per stage, so that the slowest stage is as fast as possible.

    `costs[stage][block]`: seconds of the block on that stage's device. `sizes`: bytes of each block. `capacities`: bytes for
    each stage's blocks (None: no limit). Returns None if no cut fits. With `spill`, by stage, blocks may exceed the
    capacity: each byte above it costs this number of seconds for its copy from host memory, which overlaps the stage's
    computation.
    """
    stages, count = len(costs), len(sizes)
    assert 1 <= stages <= count
    total = [[0.0, *accumulate(stage)] for stage in costs]
    held = [0, *accumulate(sizes)]
    # Dynamic programming over (stages, blocks). best[s][n]: seconds of the slowest stage if the first s stages have the
    # first n blocks in the best way; cut[s][n]: first block of stage s in that way.
    best = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage, capacity in enumerate(capacities):
        for stop in range(stage + 1, count + 1):
            for start in range(stage, stop):
                over = 0 if capacity is None else max(0, held[stop] - held[start] - max(0, capacity))
                if over and not spill:
                    continue
                worst = max(best[stage][start], total[stage][stop] - total[stage][start])
                worst = max(worst, over * spill[stage]) if over else worst
                if worst < best[stage + 1][stop] * (1 - ROUNDING):
                    best[stage + 1][stop], cut[stage + 1][stop] = worst, start
    if best[stages][count] == math.inf:
        return None
    spans, stop = [], count
    for stage in range(stages, 0, -1):
        spans.append(Span(cut[stage][stop], stop))
        stop = cut[stage][stop]
    return tuple(reversed(spans))


def cut_without_limits(costs: Sequence[Sequence[float]], sizes: Sequence[int]) -> tuple[Span, ...]:
    """`cut_blocks` without limits of memory. A model with unknown blocks is one stage without blocks."""
    if not sizes:
        assert len(costs) == 1
        return (Span(0, 0),)
    spans = cut_blocks(costs, sizes, [None] * len(costs))
    assert spans is not None
    return spans


def equally_full(limits: Sequence[float | None], sizes: Sequence[int]) -> tuple[Span, ...]:
    """Return the cut whose fullest stage is the least full. `limits`: bytes of each stage's device (None: no limit)."""
    fullness = [[0.0 if limit is None else size / max(1, limit) for size in sizes] for limit in limits]
    return cut_without_limits(fullness, sizes)


@dataclass(frozen=True)
class Balance:
    """How a model is cut."""

    stage_blocks: tuple[Span, ...]
    """Blocks of each stage, numbered through all block lists."""
    patch_shares: tuple[float, ...]
    """Each patch rank's share of the image. They sum to 1."""
    stage_costs: tuple[StageCost, ...] | None
    """Cost of each stage, for `timed_tokens`. None: nothing was measured."""
    timed_tokens: int = 1
    """Image tokens of the longer timed sequence, on each rank."""

    def costs(self, tokens: float) -> tuple[StageCost, ...] | None:
        """Return the cost of each stage, for an image with `tokens` tokens on each rank."""
        if self.stage_costs is None:
            return None
        return tuple(cost.scaled(tokens / self.timed_tokens) for cost in self.stage_costs)


def check_stage_split(stage_split: str, stages: int, blocks: int | None) -> tuple[Span, ...] | None:
    """Return the stages that the widget's text names, such as '30,27'. None for 'auto' and 'even'. Raises ValueError for
    other texts. `blocks`: the model's number. None: it is unknown yet, and any sum is accepted."""
    if stage_split.strip().lower() in ("auto", "even"):
        return None
    try:
        counts = [int(part) for part in stage_split.split(",")]
    except ValueError:
        counts = []
    if len(counts) != stages or min(counts, default=0) < 1 or sum(counts) != (blocks or sum(counts)):
        raise ValueError(
            f"stage_split is '{short(stage_split)}': use auto, even, or {stages} numbers of blocks, one for each stage of "
            f"pipefusion_degree {stages}, that add up to this model's {f'{blocks} ' * bool(blocks)}blocks."
        )
    edges = [sum(counts[:index]) for index in range(stages + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(edges))


def timed_rows(expected: Request | None, degrees: Degrees, on_gpus: bool) -> tuple[int, int]:
    """Return the rows of image tokens in the two timed sequences: the rows of a rank's whole call, within limits, and a
    quarter of them."""
    rows = CPU_ROWS
    if on_gpus:
        fewest, most = GPU_ROWS
        tokens = 0 if expected is None else expected.image / degrees.sequence
        rows = min(max(fewest, 4 * math.ceil(tokens / (4 * m.PROBE_COLUMNS))), most)
    return rows, round(QUARTER * rows)


def even_stages(blocks: int, stages: int) -> tuple[Span, ...]:
    """Stages with equal numbers of blocks, as far as possible: about the cut that measurements of equal devices give."""
    return stages_by_size([1] * blocks, stages)


def stages_by_size(sizes: Sequence[int], stages: int) -> tuple[Span, ...]:
    """Return the cut whose largest stage is as small as possible: `stage_split` auto if memory is short."""
    return cut_without_limits([sizes] * stages, sizes)


def stage_ranks(degrees: Degrees) -> list[list[int]]:
    """Return the ranks of each stage."""
    stage_of = [degrees.coordinate(rank).pipe for rank in range(degrees.world)]
    return [[rank for rank, its_stage in enumerate(stage_of) if its_stage == stage] for stage in range(degrees.pipe)]


def divide(
    degrees: Degrees,
    lists: list[str],
    sizes: list[int],
    probes: Sequence[m.Probed],
    imagined: bool = False,
    other_bytes: int | None = None,
    spill: Sequence[float] = (),
) -> Balance:
    """Return the cut by the ranks' measurements, `probes` in the order of ranks.

    `lists`: each block's list. `sizes`: bytes of each block on a rank. `other_bytes`: bytes of a rank outside its blocks;
    None if no run is known: blocks may then have WEIGHTS_SHARE of the free memory. `spill`: see spill_seconds. `imagined`:
    only a prediction, so no warning is logged.
    """
    probes = without_noise(lists, probes)

    def slowest(axis: str, index: int) -> m.Probed:
        members = [p for p in probes if getattr(degrees.coordinate(p.rank), axis) == index]
        return max(members, key=lambda p: _whole_model(lists, p))

    stages = [slowest("pipe", index) for index in range(degrees.pipe)]
    costs = [[p.blocks[name][0] for name in lists] for p in stages]
    # Embedding and head were timed together: half of their seconds go to the first block and half to the last.
    costs[0][0] += stages[0].ends[0] / 2
    costs[-1][-1] += stages[-1].ends[0] / 2
    members = stage_ranks(degrees)
    limits = [_room_for_blocks([probes[rank].free_bytes for rank in ranks], other_bytes) for ranks in members]
    blocks = cut_blocks(costs, sizes, limits, [max(spill[rank] for rank in ranks) for ranks in members] if spill else ())
    if blocks is None:
        if not imagined:
            log.warning(
                "Parallel DiT: the model barely fits into the devices' free memory, so stages are cut by memory alone."
            )
        blocks = equally_full(limits, sizes)
    speeds = [1 / _whole_model(lists, slowest("patch", index)) for index in range(degrees.patch)]
    return Balance(
        blocks,
        tuple(speed / sum(speeds) for speed in speeds),
        tuple(_stage_cost([p.blocks[name] for name in lists[span.slice]]) for p, span in zip(stages, blocks, strict=True)),
    )


def spill_seconds(rates: Sequence[float], request: Request | None) -> list[float]:
    """Return for each rank seconds that a streamed byte of weights adds to a whole image's computation. Empty: no byte
    can be streamed.

    `rates`: bytes a second from host memory to each rank's device, 0 if weights cannot come from there. A run in bands
    streams a stage's weights once for each band, with all batch entries; an exact call once for each entry.
    """
    if not rates or not all(rates):
        return []
    passes = request.bands / max(1, request.entries) if request is not None and request.kept else 1.0
    return [passes / rate for rate in rates]


def _room_for_blocks(free: Sequence[int | None], other_bytes: int | None) -> int | None:
    """Return the bytes for a stage's blocks. `free`: bytes free on its ranks' devices. None: no limit, because a device's is
    unknown."""
    known = [size for size in free if size is not None]
    if len(known) < len(free):
        return None
    return int(WEIGHTS_SHARE * min(known)) if other_bytes is None else int(USABLE_MEMORY * min(known)) - other_bytes


def _whole_model(lists: list[str], probed: m.Probed) -> float:
    return sum(probed.blocks[name][0] for name in lists) + probed.ends[0]


def without_noise(lists: list[str], probes: Sequence[m.Probed]) -> list[m.Probed]:
    """Return the probes, averaged over ranks if these are about equally fast, so that equal devices get equal parts."""
    totals = [_whole_model(lists, p) for p in probes]
    if max(totals) > ALIKE * min(totals):
        return list(probes)
    blocks = {name: tuple(fmean(p.blocks[name][i] for p in probes) for i in range(2)) for name in probes[0].blocks}
    ends = tuple(fmean(p.ends[i] for p in probes) for i in range(2))
    return [m.Probed(p.rank, blocks, ends, p.free_bytes) for p in probes]


def _stage_cost(blocks: list[tuple[float, ...]]) -> StageCost:
    """The line through the seconds of the two timed sequences. `blocks`: (longer, shorter) of each block of the stage."""
    whole, quarter = (sum(block[i] for block in blocks) for i in range(2))
    slope = max(0.0, (whole - quarter) / (1 - QUARTER))
    return StageCost(max(0.0, whole - slope), slope)
