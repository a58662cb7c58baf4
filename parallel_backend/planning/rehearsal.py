"""Rehearsals: model calls of a few blocks on the real ranks, over the real groups, at the real sizes.

All ranks work at the same time, as they do in a run: on a machine of CPU ranks they share caches and memory.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.own_class import with_class
from parallel_backend.client.call import ModelCall
from parallel_backend.client.loading import load_model
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import device_kind
from parallel_backend.core.setup import Setup
from parallel_backend.families.base.patching import Latents
from parallel_backend.processes.pool import Poll, Pool
from parallel_backend.wire.sampling import RunStats

from .prediction import AROUND, StepCost
from .workload import Workload

WARM_UP = 2
"""Calls before the timed ones. The first allocates buffers and picks kernels; the second allocates extrapolation's."""
REPEATS = (3, 12)
"""The fewest and the most timed calls."""
ENOUGH_SECONDS = 0.3
"""Seconds of timed calls after which the fewest are enough."""


@dataclass(frozen=True)
class CallKind:
    """A model call as every replica makes it at once."""

    degrees: Degrees
    """Degrees of one stage of one replica."""
    entries: int
    """Batch entries of each replica."""
    bands: int = 1
    buffered: bool = False
    """The call belongs to a run, which keeps keys and values."""
    stale: bool = False
    """The call is in `bands` patches, with the keys of the call before. Displaced patches have one band."""
    alone: bool = False
    """Only the first replica makes the call, which is quicker where ranks share caches and memory."""


@dataclass(frozen=True)
class Rehearsed:
    """A call of the kept blocks. Figures by rank are over all ranks of the pool."""

    first: StepCost
    """Of the only micro-step or, in bands, the first band's, with which the text runs."""
    other: StepCost
    """Of another band's micro-step; the same as `first` where there is no other band."""
    sent: dict[str, dict[str, tuple[int, ...]]]
    """Block, or AROUND -> mesh axis -> bytes that each rank sent in the whole call."""
    activation_bytes: tuple[int | None, ...]
    """By rank, peak bytes beside weights and buffers. None for CPU ranks, where the peak is not known."""

    def quicker(self, again: "Rehearsed") -> "Rehearsed":
        """Two rehearsals of one kind in one: the smaller of each two figures, as it was less disturbed."""
        return replace(self, first=_over([self.first, again.first], min), other=_over([self.other, again.other], min))


@dataclass(frozen=True)
class _MicroStep:
    seconds: float
    """As the client measures it."""
    stats: list[RunStats]
    """By rank."""

    @property
    def cost(self) -> StepCost:
        working = [rank.compute_seconds + rank.wait_seconds for rank in self.stats]
        blocks = {name: tuple(rank.blocks[name].seconds for rank in self.stats) for name in self.stats[0].blocks}
        inside = [sum(block.seconds for block in rank.blocks.values()) for rank in self.stats]
        around = tuple(max(0.0, whole - part) for whole, part in zip(working, inside, strict=True))
        return StepCost(blocks, around, max(0.0, self.seconds - max(working)))


def rehearse(
    pool: Pool,
    checkpoint: Checkpoint,
    workload: Workload,
    kinds: list[CallKind],
    attention: str,
    measured_shares: bool,
    poll: Poll,
    on_kind: Callable[[], None],
) -> dict[CallKind, Rehearsed]:
    """All of `kinds`, which have the same degrees. The ranks load the kept blocks, in place of the model that they held.

    `measured_shares`: displaced patches get shares of the picture by their speed. `on_kind` is called after each kind.
    """
    degrees, own = kinds[0].degrees, None
    if workload.trials is not None:
        own = workload.trials.class_for(degrees)
        checkpoint = with_class(checkpoint, own)
    replicas = len(pool.devices) // degrees.world
    setup = Setup(
        path=checkpoint.path,
        dtype=workload.dtype,
        devices=pool.devices,
        degrees=replace(degrees, batch=replicas),
        attention=attention,
        stage_split="auto" if measured_shares and degrees.patch > 1 else "even",
        transfer_dtype=workload.sizes.transfer_dtype,
        own_class=own,
        conversion=checkpoint.conversion,
    )
    model = load_model(pool, checkpoint, setup, poll, only=workload.kept)
    rehearsed = {}
    for kind in kinds:
        assert kind.degrees == degrees
        batch = 1 if kind.alone else replicas * kind.entries
        example = checkpoint.family.inputs.example(checkpoint.config, workload.prompt)
        tensors = {name: tensor.repeat(batch, *(1,) * (tensor.ndim - 1)) for name, tensor in example.items()}
        x = checkpoint.family.noise((batch, *workload.shape[1:]))
        rehearsed[kind] = (_in_a_run if kind.buffered else _whole)(model, kind, x, tensors, poll)
        on_kind()
    return rehearsed


def _whole(model: RemoteTransformer, kind: CallKind, x: Latents, tensors, poll: Poll) -> Rehearsed:
    timestep, given = torch.full((len(x[0]),), 0.5), x if len(x) > 1 else x[0]

    def call(_number: int) -> list[_MicroStep]:
        return [_timed(model, lambda: model.predict(ModelCall(given, timestep, tensors), poll), poll)]

    return _sum_up(model, _calls(call))


def _in_a_run(model: RemoteTransformer, kind: CallKind, latents: Latents, tensors, poll: Poll) -> Rehearsed:
    """Bands run one after the other here: the prediction's simulation overlaps them."""
    patching = model.family.patching
    shapes = [tuple(latent.shape) for latent in latents]
    patching = patching.cut(patching.best_axis(patching.grid(shapes[0])))
    companion_tokens = patching.companion_tokens(shapes)
    text = model.family.text_tokens(patching.grid(shapes[0]), companion_tokens, tensors)
    rows = cut_rows(shapes[0], kind.bands, patching, text)
    run = BandedRun(model, rows, shapes[0], warm_up=False, along=patching.along, companion_tokens=companion_tokens)

    def call(number: int) -> list[_MicroStep]:
        timestep = torch.full((len(latents[0]),), 1 - number / 100)

        def band(index: int) -> Callable[[], object]:
            call = ModelCall(patching.band(latents, rows[index]), timestep, tensors)
            return lambda: run.predict(index, call, not kind.stale, poll)

        return [_timed(model, band(index), poll) for index in range(len(rows))]

    calls = _calls(call)
    model.close_run(run.run, poll)
    return _sum_up(model, calls)


def _timed(model: RemoteTransformer, step: Callable[[], object], poll: Poll) -> _MicroStep:
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    return _MicroStep(seconds, model.close_run(0, poll))


def _calls(call: Callable[[int], list[_MicroStep]]) -> list[list[_MicroStep]]:
    for number in range(WARM_UP):
        call(number)
    calls: list[list[_MicroStep]] = []
    least, most = REPEATS
    started = time.perf_counter()
    while len(calls) < least or (len(calls) < most and time.perf_counter() - started < ENOUGH_SECONDS):
        calls.append(call(WARM_UP + len(calls)))
    return calls


def _sum_up(model: RemoteTransformer, calls: list[list[_MicroStep]]) -> Rehearsed:
    """Medians over calls; traffic and memory of the last one."""
    first, *others = (_over([step.cost for step in steps], median) for steps in zip(*calls, strict=True))
    last, ranks = calls[-1], range(len(model.pool.devices))
    sent = {name: _add([[rank.blocks[name].bytes_sent for rank in step.stats] for step in last]) for name in first.blocks}
    inside = _add([[{axis: counts[rank] for axis, counts in block.items()} for rank in ranks] for block in sent.values()])
    whole = _add([[rank.bytes_sent for rank in step.stats] for step in last])
    sent[AROUND] = {
        axis: tuple(all_ - part for all_, part in zip(counts, inside.get(axis, (0,) * len(counts)), strict=True))
        for axis, counts in whole.items()
    }
    buffers = [max(step.stats[rank].buffer_bytes for step in last) for rank in ranks]
    peaks = tuple(
        None if device_kind(device) == "cpu" else max(0, stats.peak_bytes - weights - buffer)
        for device, stats, weights, buffer in zip(
            model.pool.devices, last[-1].stats, model.weight_bytes, buffers, strict=True
        )
    )
    return Rehearsed(first, _over(others, fmean) if others else first, sent, peaks)


def _over(costs: list[StepCost], figure: Callable[[list[float]], float]) -> StepCost:
    """One cost, each of whose figures is `figure` of that figure in all `costs`."""
    ranks = range(len(costs[0].around))
    return StepCost(
        {name: tuple(figure([cost.blocks[name][rank] for cost in costs]) for rank in ranks) for name in costs[0].blocks},
        tuple(figure([cost.around[rank] for cost in costs]) for rank in ranks),
        figure([cost.hop for cost in costs]),
    )


def _add(parts: list[list[dict[str, int]]]) -> dict[str, tuple[int, ...]]:
    """[part][rank] -> axis -> bytes, added up over parts: axis -> by rank."""
    axes = sorted({axis for part in parts for rank in part for axis in rank})
    return {axis: tuple(sum(part[r].get(axis, 0) for part in parts) for r in range(len(parts[0]))) for axis in axes}
