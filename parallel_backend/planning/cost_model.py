"""The cost model: what a micro-step takes on a stage, transfers and all, and a run made of micro-steps.

Formulas: docs/planner.md. A is the bytes of the micro-step's hidden states, P the ranks that share its tokens.
"""

from collections import Counter
from dataclasses import dataclass

from parallel_backend.client.placement.balance import Balance, divide
from parallel_backend.core.degrees import SEQUENCE_AXES
from parallel_backend.core.spans import Span
from parallel_backend.wire.diagnosis import Probed

from .machine import BlockCost, Machine
from .modes import Mode
from .prediction import pipeline_seconds
from .workload import Workload

BEFORE = 0.75
"""Share of Ulysses' bytes that travel before attention, as queries, keys and values in one message; the rest after it."""
SUMS = 2
"""Results that tensor parallelism adds up in a block."""


@dataclass(frozen=True)
class Job:
    """A run of a model. `joint`: text tokens go through the blocks beside the image's, rather than being looked at.

    `text_in_bands`: with every band, as xDiT runs it; here it runs with the first one alone.
    """

    subject: Workload
    joint: bool = True
    text_in_bands: bool = False

    @property
    def text(self) -> int:
        """Tokens that the blocks compute beside the image's."""
        return self.subject.text if self.joint else 0

    def queries(self, bands: int | None, band: int | None) -> float:
        """Tokens of a micro-step: of the whole call where `band` is None."""
        if band is None:
            return self.subject.image + self.text
        return self.subject.image / bands + (self.text if band == 0 or self.text_in_bands else 0)


class Stages:
    """A mode on a machine: how the blocks are cut, and what each stage takes for a micro-step."""

    def __init__(self, machine: Machine, job: Job, mode: Mode):
        self.machine, self.job, self.mode = machine, job, mode
        self.subject, self.degrees = job.subject, mode.degrees
        self.lists = [block.partition(".")[0] for block in self.subject.blocks]
        self.found = self._balance()

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.found.stage_blocks

    def members(self, stage: int) -> list[int]:
        return [rank for rank in range(self.degrees.world) if self.degrees.coordinate(rank).pipe == stage]

    def seconds(self, stage: int, band: int | None, entries: int, fresh: bool) -> float:
        """Of one micro-step on the slowest rank. `fresh`: displaced patches wait for each other's keys."""
        queries, keys = self.job.queries(self.mode.bands, band), self.job.queries(None, None)
        members = self.members(stage)
        blocks = Counter(self.lists[self.spans[stage].slice])
        # Embedding and head are on the outer stages, half each.
        share = (int(stage == 0) + int(stage == self.degrees.pipe - 1)) / 2
        around = max(self._compute(self.machine.devices[r].around, r, queries, 0, entries, cut=False) for r in members)
        total, hidden = share * around, 0.0
        for name, count in blocks.items():
            compute = max(self._compute(self.machine.devices[r].blocks[name], r, queries, keys, entries) for r in members)
            waits, beside = self._transfers(name, members, queries, keys, entries, fresh)
            total += count * (compute + waits)
            hidden += count * beside
        return max(total, hidden)

    def sent(self, axis: str, queries: float, entries: int) -> float:
        """Bytes that a rank sends for one block of a micro-step."""
        degrees = self.degrees
        size, count = entries * queries * self.subject.token_bytes / degrees.sequence, getattr(degrees, axis)
        if axis == "ulysses":
            return 4 * size / degrees.tensor * (count - 1) / count
        if axis in ("ring", "patch"):
            return 2 * size / degrees.tensor * (count - 1)
        assert axis == "tensor"
        return 2 * SUMS * size * (count - 1) / count

    def on(self, stage: int, band: int | None, entries: int) -> float:
        """Bytes that a rank sends to the next stage."""
        carried = 1 + self.subject.carried[self.spans[stage].stop]
        return entries * self.job.queries(self.mode.bands, band) * self.subject.token_bytes * carried / self.degrees.sequence

    def _compute(self, cost: BlockCost, rank: int, queries: float, keys: float, entries: int, cut: bool = True) -> float:
        degrees = self.degrees
        share = self.found.patch_shares[degrees.coordinate(rank).patch] / (degrees.ulysses * degrees.ring)
        return cost.fixed + entries * cost.work(queries, keys) * share / (degrees.tensor if cut else 1)

    def _transfers(
        self, name: str, members: list[int], queries: float, keys: float, entries: int, fresh: bool
    ) -> tuple[float, float]:
        """Seconds of a block's transfers: those that the block waits for, and those that run beside all computing."""
        degrees, links = self.degrees, self.machine.links
        waits = beside = 0.0
        if degrees.ulysses > 1:
            groups, sent = self._groups("ulysses", members), self.sent("ulysses", queries, entries)
            waits += links.exchange(groups, BEFORE * sent) + links.exchange(groups, (1 - BEFORE) * sent)
        if degrees.ring > 1:
            steps, groups = degrees.ring - 1, self._groups("ring", members)
            shift = links.shift(groups, self.sent("ring", queries, entries) / steps)
            latency = links.shift(groups, 0.0)  # never hidden: both ends wait for each other in every step
            slowest = min(self.machine.devices[rank].blocks[name].attention(queries, keys) for rank in members)
            attention = entries * slowest / (degrees.sequence * degrees.tensor * degrees.ring)
            waits += steps * (latency + max(0.0, shift - latency - attention))
        if degrees.tensor > 1:
            size = entries * queries * self.subject.token_bytes / degrees.sequence
            waits += SUMS * links.add_up(self._groups("tensor", members), size)
        if degrees.patch > 1:
            seconds = links.exchange(self._groups("patch", members), self.sent("patch", queries, entries))
            waits, beside = (waits + seconds, 0.0) if fresh else (waits, seconds)
        return waits, beside

    def _groups(self, axis: str, members: list[int]) -> list[list[int]]:
        """The ranks among `members` that differ in nothing but this axis."""
        groups: dict[tuple, list[int]] = {}
        for rank in members:
            at = self.degrees.coordinate(rank)
            others = tuple(getattr(at, other) for other in ("batch", "pipe", *SEQUENCE_AXES, "tensor") if other != axis)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def _balance(self) -> Balance:
        """As stage_split auto cuts the blocks."""
        tokens = self.job.queries(None, None)

        def probed(rank: int) -> Probed:
            device = self.machine.devices[rank]
            blocks = {name: cost.fixed + cost.work(tokens, tokens) for name, cost in device.blocks.items()}
            around = device.around.fixed + device.around.work(tokens, 0)
            return Probed(rank, {name: (each, each) for name, each in blocks.items()}, (around, around), device.memory)

        sizes = [size // self.degrees.tensor for size in self.subject.block_bytes]
        return divide(self.degrees, self.lists, sizes, [probed(rank) for rank in range(self.degrees.world)], True)


def run_seconds(stages: Stages) -> float:
    """Of the whole run: its first `warm_up_steps` calls exact, the others in bands where the mode has any."""
    mode, subject, hop = stages.mode, stages.subject, stages.machine.hop
    entries, steps, first = mode.entries(subject), subject.steps, subject.warm_up_steps
    if mode.degrees.pipe == 1:
        exact, stale = (stages.seconds(0, None, entries, fresh) + hop for fresh in (True, False))
        return steps * exact if mode.exact else first * exact + (steps - first) * stale
    count = mode.degrees.pipe
    apart = mode.degrees.sequence * mode.degrees.tensor
    # An exact call's entries follow each other through the stages; a band's go together.
    kinds = {None: 1, 0: entries, 1: entries}
    costs = {band: [stages.seconds(stage, band, many, True) for stage in range(count)] for band, many in kinds.items()}
    ways = {
        band: [
            max(stages.machine.links.send(r, r + apart, stages.on(stage, band, many)) for r in stages.members(stage))
            for stage in range(count - 1)
        ]
        + [0.0]
        for band, many in kinds.items()
    }
    exact = [step < first for step in range(steps)]

    def kind(band: int | None) -> int | None:
        return None if band is None else min(band, 1)

    return pipeline_seconds(exact, mode.bands, entries, lambda band: costs[kind(band)], lambda band: ways[kind(band)], hop)
