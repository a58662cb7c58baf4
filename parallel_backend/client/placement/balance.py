"""Who gets how much: blocks to stages and bands to patch ranks, from measured block costs or as the user says."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.processes.pool import Poll, Pool
from parallel_backend.wire import messages as m

from .measurements import measured_blocks
from .pipeline_model import StageCost


def cut_blocks(
    costs: Sequence[Sequence[float]], sizes: Sequence[int], capacities: Sequence[int | None]
) -> tuple[Span, ...] | None:
    """Cut the blocks into consecutive non-empty spans, one per stage, so that the slowest stage is as fast as possible.

    `costs[stage][block]`: seconds of the block on that stage's device. A stage's blocks, of these `sizes` in bytes, must
    fit its capacity (None: no limit). None where no cut fits.
    """
    stages, count = len(costs), len(sizes)
    assert 1 <= stages <= count
    total = [[0.0, *accumulate(stage)] for stage in costs]
    held = [0, *accumulate(sizes)]
    # best[s][n]: smallest possible slowest stage when the first s stages have n blocks; cut[s][n]: where its last starts
    best = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage, capacity in enumerate(capacities):
        for stop in range(stage + 1, count + 1):
            for start in range(stage, stop):
                if capacity is not None and held[stop] - held[start] > capacity:
                    continue
                worst = max(best[stage][start], total[stage][stop] - total[stage][start])
                if worst < best[stage + 1][stop] * (1 - ROUNDING):
                    best[stage + 1][stop], cut[stage + 1][stop] = worst, start
    if best[stages][count] == math.inf:
        return None
    spans, stop = [], count
    for stage in range(stages, 0, -1):
        spans.append(Span(cut[stage][stop], stop))
        stop = cut[stage][stop]
    return tuple(reversed(spans))


log = logging.getLogger(__name__)

ROUNDING = 1e-9
"""Sums of seconds that differ by less than this part of them are equal: the order of adding moves the last digits."""
ALIKE = 1.2
"""Devices whose times differ by less than this factor count as equal: so much is noise."""
WEIGHTS_SHARE = 0.85
"""Part of a device's free memory that weights may take. The rest is for activations and K/V buffers."""
QUARTER = 0.25


@dataclass(frozen=True)
class Balance:
    """`stage_blocks`: per stage, of all block lists counted through. `patch_shares`: per patch rank, sum 1.

    `stage_costs`: per stage, what the schedule model needs (pipeline_model.py); None where nothing was measured.
    """

    stage_blocks: tuple[Span, ...]
    patch_shares: tuple[float, ...]
    stage_costs: tuple[StageCost, ...] | None


def check_stage_split(stage_split: str, stages: int, blocks: int) -> tuple[Span, ...] | None:
    """The stages that the widget's text gives by hand; None for 'auto' and 'even'. ValueError if it makes no sense."""
    if stage_split.strip().lower() in ("auto", "even"):
        return None
    try:
        counts = [int(part) for part in stage_split.split(",")]
    except ValueError:
        counts = []
    if len(counts) != stages or min(counts, default=0) < 1 or sum(counts) != blocks:
        raise ValueError(
            f"stage_split is '{stage_split}': use auto, even, or {stages} numbers of blocks, one for each stage of "
            f"pipefusion_degree {stages}, that add up to this model's {blocks} blocks."
        )
    edges = [sum(counts[:index]) for index in range(stages + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(edges))


def balance(pool: Pool, checkpoint: Checkpoint, degrees: Degrees, dtype: str, stage_split: str, poll: Poll) -> Balance:
    """Measure where there is something to divide and the user left it to us; this takes the ranks' present model away."""
    family, config = checkpoint.family, checkpoint.config
    lists = [name for name, count in family.blocks.counts(config).items() for _ in range(count)]
    by_hand = check_stage_split(stage_split, degrees.pipe, len(lists))
    even = (1 / degrees.patch,) * degrees.patch
    if by_hand is not None or stage_split.strip().lower() == "even" or degrees.pipe == degrees.patch == 1:
        sizes = [1] * len(lists)
        blocks = by_hand or cut_blocks([sizes] * degrees.pipe, sizes, [None] * degrees.pipe)
        return Balance(blocks, even, None)
    probes = measured_blocks(pool, m.Probe(str(checkpoint.path), dtype), lists, poll)
    return divide(degrees, lists, block_bytes(checkpoint, lists, dtype, degrees.tensor), probes)


def divide(
    degrees: Degrees, lists: list[str], sizes: list[int], probes: Sequence[m.Probed], imagined: bool = False
) -> Balance:
    """Balance for blocks of these lists and sizes in bytes, from what each rank (in rank order) measured.

    `imagined`: nothing is about to be loaded so, hence nobody is warned.
    """
    probes = without_noise(lists, probes)

    def slowest(axis: str, index: int) -> m.Probed:
        members = [p for p in probes if getattr(degrees.coordinate(p.rank), axis) == index]
        return max(members, key=lambda p: _whole_model(lists, p))

    stages = [slowest("pipe", index) for index in range(degrees.pipe)]
    last = degrees.pipe - 1
    costs = [[p.blocks[name][0] for name in lists] for p in stages]
    for index, block in ((0, 0), (last, -1)):  # embedding and head, half each
        costs[index][block] += stages[index].ends[0] / 2
    free = [[p.free_bytes for p in probes if degrees.coordinate(p.rank).pipe == index] for index in range(degrees.pipe)]
    room = [None if None in given else int(WEIGHTS_SHARE * min(given)) for given in free]
    blocks = cut_blocks(costs, sizes, room)
    if blocks is None:
        if not imagined:
            log.warning("Parallel DiT: the weights hardly fit the devices' free memory; stages are cut by speed alone.")
        blocks = cut_blocks(costs, sizes, [None] * degrees.pipe)
    speeds = [1 / _whole_model(lists, slowest("patch", index)) for index in range(degrees.patch)]
    return Balance(
        blocks,
        tuple(speed / sum(speeds) for speed in speeds),
        tuple(_stage_cost([p.blocks[name] for name in lists[span.slice]]) for p, span in zip(stages, blocks, strict=True)),
    )


def block_bytes(checkpoint: Checkpoint, lists: list[str], dtype: str, tensor: int) -> list[int]:
    """Bytes of each block on one rank."""
    sizes = dict.fromkeys(((name, index) for index, name in _numbered(lists)), 0)
    for target in checkpoint.key_map:
        name, _, rest = target.partition(".")
        if name in lists:
            sizes[name, int(rest.partition(".")[0])] += checkpoint.nbytes(target, dtype) // tensor
    return list(sizes.values())


def _numbered(lists: list[str]) -> list[tuple[int, str]]:
    """Each block's index in its own list."""
    return [(lists[:place].count(name), name) for place, name in enumerate(lists)]


def _whole_model(lists: list[str], probed: m.Probed) -> float:
    return sum(probed.blocks[name][0] for name in lists) + probed.ends[0]


def without_noise(lists: list[str], probes: Sequence[m.Probed]) -> list[m.Probed]:
    """Ranks that are about as fast as each other get the same figures, so that equal devices get equal parts."""
    totals = [_whole_model(lists, p) for p in probes]
    if max(totals) > ALIKE * min(totals):
        return list(probes)
    blocks = {name: tuple(fmean(p.blocks[name][i] for p in probes) for i in range(2)) for name in probes[0].blocks}
    ends = tuple(fmean(p.ends[i] for p in probes) for i in range(2))
    return [m.Probed(p.rank, blocks, ends, p.free_bytes) for p in probes]


def _stage_cost(blocks: list[tuple[float, float]]) -> StageCost:
    """A line through the two measured sizes."""
    whole, quarter = (sum(block[i] for block in blocks) for i in range(2))
    slope = max(0.0, (whole - quarter) / (1 - QUARTER))
    return StageCost(max(0.0, whole - slope), slope)
