"""Model calls of a few blocks on the real ranks, over the real groups, at the real sizes: what a block costs in a mode.

All ranks work at the same time, as they do in a run: on a machine of CPU ranks they share caches and memory.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.devices import device_kind
from parallel_backend.processes.pool import Poll, Pool
from parallel_backend.wire.sampling import RunStats

from .modes import CallKind
from .workload import Workload

AROUND = ""
"""Stands where a block's name does for all that is not in a block."""
WARM_UP = 2
"""Calls that are not counted: the first makes buffers and picks kernels, the second makes those of extrapolation."""
REPEATS = (3, 12)
ENOUGH_SECONDS = 0.3
"""So many calls are counted at least and at most; after this time no more than needed."""


@dataclass(frozen=True)
class Cost:
    """A micro-step's seconds. `blocks`: block -> by rank, transfers in it included. `around`: by rank, all else."""

    blocks: dict[str, tuple[float, ...]]
    around: tuple[float, ...]


@dataclass(frozen=True)
class Rehearsed:
    """A call of the kept blocks. `first`: its only micro-step or, in bands, that of band 0, with which the text runs;
    `other`: another band's (the same where there is none).

    `hop`: seconds of a micro-step that pass outside of the ranks. `moved`: block, or AROUND -> mesh axis -> bytes that each
    rank sent in the whole call. `buffer_bytes`: by rank, K/V buffers of one block. `activation_bytes`: by rank, memory
    beside weights and buffers at its peak; None for CPU ranks, which cannot tell.
    """

    first: Cost
    other: Cost
    hop: float
    moved: dict[str, dict[str, tuple[int, ...]]]
    buffer_bytes: tuple[int, ...]
    activation_bytes: tuple[int | None, ...]

    def quicker(self, again: "Rehearsed") -> "Rehearsed":
        """Of two rehearsals of one kind, each figure where it was less disturbed."""
        first, other = (_over([getattr(self, part), getattr(again, part)], min) for part in ("first", "other"))
        return replace(self, first=first, other=other, hop=min(self.hop, again.hop))


@dataclass(frozen=True)
class _Measured:
    """One micro-step."""

    seconds: float  # at the client
    stats: list[RunStats]

    @property
    def cost(self) -> Cost:
        blocks = {name: tuple(rank.blocks[name].seconds for rank in self.stats) for name in self.stats[0].blocks}
        inside = [sum(block.seconds for block in rank.blocks.values()) for rank in self.stats]
        return Cost(blocks, tuple(max(0.0, _working(rank) - part) for rank, part in zip(self.stats, inside, strict=True)))

    @property
    def hop(self) -> float:
        return max(0.0, self.seconds - max(map(_working, self.stats)))


def rehearse(
    pool: Pool,
    checkpoint: Checkpoint,
    subject: Workload,
    kinds: list[CallKind],
    attention: str,
    measured_shares: bool,
    poll: Poll,
    on_kind: Callable[[], None],
) -> dict[CallKind, Rehearsed]:
    """All of `kinds`, which have one cut. Loads the kept blocks on the ranks, in place of whatever model they held.

    `measured_shares`: displaced patches get shares of the picture by their speed. `on_kind` is called after each kind.
    """
    cut = kinds[0].cut
    replicas = len(pool.devices) // cut.world
    split = "auto" if measured_shares and cut.patch > 1 else "even"
    model = RemoteTransformer(
        pool, checkpoint, replace(cut, batch=replicas), subject.dtype, attention, poll, split, only=subject.kept
    )
    found = {}
    for kind in kinds:
        assert kind.cut == cut
        batch = 1 if kind.alone else replicas * kind.entries
        example = checkpoint.family.inputs.example(checkpoint.config, subject.prompt)
        tensors = {name: tensor.repeat(batch, *(1,) * (tensor.ndim - 1)) for name, tensor in example.items()}
        x = torch.randn(batch, *subject.shape[1:])
        found[kind] = (_in_a_run if kind.buffered else _whole)(model, kind, x, tensors, poll)
        on_kind()
    return found


def _whole(model: RemoteTransformer, kind: CallKind, x: torch.Tensor, tensors, poll: Poll) -> Rehearsed:
    timestep = torch.full((len(x),), 0.5)

    def call(_number: int) -> list[_Measured]:
        return [_timed(model, lambda: model.predict(x, timestep, tensors, poll), poll)]

    return _sum_up(model, kind, _calls(call))


def _in_a_run(model: RemoteTransformer, kind: CallKind, x: torch.Tensor, tensors, poll: Poll) -> Rehearsed:
    """Bands one after the other: which overlap with what is the schedule's affair, not theirs."""
    patching = model.family.patching
    rows = cut_rows(tuple(x.shape), kind.bands, patching)
    run = BandedRun(model, rows, tuple(x.shape), warm_up=False)

    def call(number: int) -> list[_Measured]:
        timestep = torch.full((len(x),), 1 - number / 100)

        def band(index: int) -> Callable[[], object]:
            return lambda: run.predict(index, patching.rows(x, rows[index]), timestep, tensors, not kind.stale, poll)

        return [_timed(model, band(index), poll) for index in range(len(rows))]

    calls = _calls(call)
    model.close_run(run.run, poll)
    return _sum_up(model, kind, calls)


def _timed(model: RemoteTransformer, step: Callable[[], object], poll: Poll) -> _Measured:
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    return _Measured(seconds, model.close_run(0, poll))


def _calls(call: Callable[[int], list[_Measured]]) -> list[list[_Measured]]:
    for number in range(WARM_UP):
        call(number)
    calls: list[list[_Measured]] = []
    least, most = REPEATS
    started = time.perf_counter()
    while len(calls) < least or (len(calls) < most and time.perf_counter() - started < ENOUGH_SECONDS):
        calls.append(call(WARM_UP + len(calls)))
    return calls


def _sum_up(model: RemoteTransformer, kind: CallKind, calls: list[list[_Measured]]) -> Rehearsed:
    """Medians over calls."""
    first = _median([call[0].cost for call in calls])
    others = [_median([call[band].cost for call in calls]) for band in range(1, len(calls[0]))]
    last = calls[-1]
    names, ranks = last[0].stats[0].blocks, range(len(last[0].stats))
    moved = {name: _add([[rank.blocks[name].bytes_sent for rank in step.stats] for step in last]) for name in names}
    inside = _add([[{axis: counts[rank] for axis, counts in block.items()} for rank in ranks] for block in moved.values()])
    total = _add([[rank.bytes_sent for rank in step.stats] for step in last])
    moved[AROUND] = {
        axis: tuple(a - b for a, b in zip(counts, inside.get(axis, (0,) * len(counts)), strict=True))
        for axis, counts in total.items()
    }
    buffers = [max(step.stats[r].buffer_bytes for step in last) for r in ranks]
    return Rehearsed(
        first,
        _mean(others) if others else first,
        median(step.hop for call in calls for step in call),
        moved,
        tuple(math.ceil(size / len(names)) for size in buffers),
        tuple(
            None if device_kind(device) == "cpu" else max(0, stats.peak_bytes - weights - buffer)
            for device, stats, weights, buffer in zip(
                model.pool.devices, last[-1].stats, model.weight_bytes, buffers, strict=True
            )
        ),
    )


def _working(rank: RunStats) -> float:
    return rank.compute_seconds + rank.wait_seconds


def _median(costs: list[Cost]) -> Cost:
    return _over(costs, median)


def _mean(costs: list[Cost]) -> Cost:
    return _over(costs, fmean)


def _over(costs: list[Cost], figure: Callable[[list[float]], float]) -> Cost:
    ranks = range(len(costs[0].around))
    return Cost(
        {name: tuple(figure([cost.blocks[name][rank] for cost in costs]) for rank in ranks) for name in costs[0].blocks},
        tuple(figure([cost.around[rank] for cost in costs]) for rank in ranks),
    )


def _add(parts: list[list[dict[str, int]]]) -> dict[str, tuple[int, ...]]:
    """[part][rank] -> axis -> bytes, added up over parts: axis -> by rank."""
    axes = sorted({axis for part in parts for rank in part for axis in rank})
    return {axis: tuple(sum(part[r].get(axis, 0) for part in parts) for r in range(len(parts[0]))) for axis in axes}
