"""Costs computed from a calibration: a few figures of a machine, for every mode and any image. docs/planner.md has the
formulas in one place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from parallel_backend.core.degrees import SEQUENCE_AXES, Degrees
from parallel_backend.core.packed_values import change_bits, change_bytes, group_size, ulysses_bytes
from parallel_backend.own_class.built.built_class import StreamKeys
from parallel_backend.placement.balance import Balance, stage_ranks
from parallel_backend.placement.memory_model import head_values
from parallel_backend.placement.model_sizes import ModelSizes

from .machine import Machine
from .modes import Mode
from .workload import Workload, list_of

SUMS = 2
"""All-reduces of a block under tensor parallelism: of attention's result and of the feed-forward's."""
LEAST_GROWTH = 0.05
"""Minimum fraction of the longer timed sequence's seconds that is assumed to grow with the tokens."""


@dataclass(frozen=True)
class BlockCost:
    """Seconds of a block for one batch entry: `fixed` + `token` * (queries + `pairs` * queries * keys)."""

    fixed: float
    token: float
    pairs: float
    """Operations of attention for one pair of query and key, divided by those of one token's linear layers."""

    def work(self, queries: float, keys: float) -> float:
        """Return the seconds that depend on the numbers of queries and keys, without `fixed`."""
        return self.token * queries + self.attention(queries, keys)

    def attention(self, queries: float, keys: float) -> float:
        """Return the seconds of attention, a part of `work`."""
        return self.token * self.pairs * queries * keys

    def whole(self, tokens: float) -> float:
        """Return the seconds for a sequence of `tokens` tokens."""
        return self.fixed + self.work(tokens, tokens)


def through(times: Sequence[tuple[int, float]], pairs: float) -> BlockCost:
    """Return the cost through the (tokens, seconds) of a shorter and a longer sequence.

    Attention grows with the square of the tokens, because the cost is for sequences of any length; balance.StageCost is a
    straight line, because it is for bands of a timed sequence. No part is negative, and at least LEAST_GROWTH grows with the
    tokens: a GPU that neither sequence fills shows no growth, so that longer sequences would seem to cost nothing.
    """
    (short, quick), (long, slow) = sorted(times)
    sizes = [tokens * (1 + pairs * tokens) for tokens in (short, long)]
    most = slow / sizes[1]
    slope = min(most, max(LEAST_GROWTH * most, (slow - quick) / (sizes[1] - sizes[0])))
    return BlockCost(max(0.0, slow - slope * sizes[1]), slope, pairs)


@dataclass(frozen=True)
class DeviceCost:
    blocks: Mapping[str, BlockCost]
    """Block list -> cost of one of its blocks."""
    around: BlockCost
    """Cost of all computation outside the blocks."""


@dataclass(frozen=True)
class Calibration:
    """A machine, and the costs of a kind of model on it."""

    machine: Machine
    costs: tuple[DeviceCost, ...]
    """Cost of each device."""
    hop: float = 0.0
    """Seconds from a model call's output to the next call's start."""


class StepKind(Enum):
    """The kind of a micro-step. Micro-steps of one kind cost the same."""

    EXACT = "exact"
    """The whole latent; on a pipeline one batch entry of it."""
    FIRST_BAND = "first band"
    """The first band with the text, or the whole latent with displaced patches. All batch entries."""
    OTHER_BAND = "other band"


@dataclass(frozen=True)
class StepCost:
    """Seconds of a micro-step. Figures by rank are in the order of the mode's ranks."""

    blocks: Mapping[str, tuple[float, ...]]
    """Kind of block -> for each rank, seconds of one such block, including its transfers."""
    around: tuple[float, ...]
    """Seconds outside the blocks, for each rank."""


@dataclass(frozen=True)
class CalibratedCosts:
    """The costs of a workload on a machine, from which `predict` predicts a run."""

    calibration: Calibration
    workload: Workload

    @property
    def machine(self) -> Machine:
        return self.calibration.machine

    def by_device(self, mode: Mode) -> StepCost:
        """Return the costs of a whole call, by which stages are cut."""
        costs, tokens = [self.calibration.costs[device] for device in mode.devices], self.workload.tokens
        return StepCost(
            {name: tuple(_of(cost, name).whole(tokens) for cost in costs) for name in self.workload.kinds},
            tuple(cost.around.fixed + cost.around.work(tokens, 0) for cost in costs),
        )

    def step(self, mode: Mode, kind: StepKind, cut: Balance) -> StepCost:
        degrees = mode.degrees
        entries = 1 if kind is StepKind.EXACT and degrees.pipe > 1 else mode.entries(self.workload)
        queries, keys = sum(self._tokens(mode, kind)), self.workload.tokens
        costs = [self.calibration.costs[device] for device in mode.devices]

        def compute(rank: int, cost: BlockCost, keys: float, tensor: int) -> float:
            share = cut.patch_shares[degrees.coordinate(rank).patch] / (degrees.ulysses * degrees.ring)
            return cost.fixed + entries * cost.work(queries, keys) * share / tensor

        blocks = {name: [0.0] * degrees.world for name in self.workload.kinds}
        for ranks in stage_ranks(degrees):
            for name, seconds in blocks.items():
                block_costs = {rank: _of(costs[rank], name) for rank in ranks}
                slowest = max(compute(rank, cost, keys, degrees.tensor) for rank, cost in block_costs.items())
                attention = entries * min(cost.attention(queries, keys) for cost in block_costs.values())
                waits, overlapped = self._transfers(mode, ranks, name, kind, entries, attention)
                for rank in ranks:
                    seconds[rank] = max(slowest + waits, overlapped)
        around = tuple(compute(rank, cost.around, 0.0, 1) for rank, cost in enumerate(costs))
        return StepCost({name: tuple(seconds) for name, seconds in blocks.items()}, around)

    def _tokens(self, mode: Mode, kind: StepKind) -> tuple[float, int]:
        """Return the tokens of one batch entry in a micro-step: (of the image, averaged over bands that are not the first;
        of the text)."""
        workload = self.workload
        if kind is StepKind.EXACT:
            return workload.image, workload.text
        first = kind is StepKind.FIRST_BAND
        return workload.band_image(mode.bands, first), workload.text if first or workload.text_in_bands else 0

    def _key_bytes(self, mode: Mode, axis: str, block: str, kind: StepKind, entries: int) -> float:
        """Bytes of keys and values that a rank sends along `axis`, ring or patch, for one block in a micro-step."""
        degrees, count, sizes = mode.stage_degrees, getattr(mode.degrees, axis), self.workload.sizes
        keys = self._keys(mode, block, sizes, degrees, kind, entries) / degrees.patch
        if axis == "ring":
            return keys / count * (count - 1)
        sent, bits = keys * (count - 1), change_bits(sizes.transfer_dtype)  # a patch rank has the other ring ranks' keys too
        if bits and kind is not StepKind.EXACT:
            group = group_size(sizes.head_size)
            sent *= change_bytes(group, group, bits) / (group * sizes.itemsize)
        return sent

    def _ulysses_bytes(self, mode: Mode, block: str, kind: StepKind, entries: int) -> tuple[float, float]:
        """Return the bytes that a Ulysses rank sends for one block: (before attention, after it)."""
        degrees, count, sizes = mode.stage_degrees, mode.degrees.ulysses, self.workload.sizes
        # By all-to-all keys and values travel repeated, once for each query head, as the class has them. Queries and results
        # are as many bytes: layers in which one stream attends to the other come in pairs.
        repeated = self._keys(mode, block, replace(sizes, sharing=1), Degrees(tensor=degrees.tensor), kind, entries)
        packed = ulysses_bytes(sizes.transfer_dtype, sizes.head_size, sizes.itemsize) / sizes.itemsize
        results = repeated / 2 * packed / degrees.sequence * (count - 1) / count
        return 3 * results, results

    def _keys(self, mode: Mode, block: str, sizes: ModelSizes, degrees: Degrees, kind: StepKind, entries: int) -> float:
        """Bytes of the keys and values of all tokens that a micro-step computes for a block, on the rank with most heads."""
        image, text = self._tokens(mode, kind)
        values = head_values(self._layers(block), image, text, self.workload.streams)
        heads = max(sizes.key_heads_on(degrees, degrees.coordinate(rank)) for rank in range(degrees.world))
        return 2 * entries * heads * values * sizes.itemsize

    def _layers(self, block: str) -> tuple[StreamKeys, ...]:
        """For each attention layer of a block, the tokens whose keys it has."""
        return self.workload.sizes.attention[self.workload.blocks.index(block)]

    def _transfers(
        self, mode: Mode, members: list[int], block: str, kind: StepKind, entries: int, attention: float
    ) -> tuple[float, float]:
        """Return the seconds of a block's transfers in a micro-step: (those that it waits for, those that overlap its
        computation). `members`: the ranks of its stage. `attention`: seconds of the whole attention, uncut."""
        degrees, links, layers = mode.degrees, self.machine.links, len(self._layers(block))
        waits = overlapped = 0.0
        if degrees.ulysses > 1:
            groups, parts = _groups(mode, "ulysses", members), self._ulysses_bytes(mode, block, kind, entries)
            waits += layers * sum(links.exchange(groups, part / layers) for part in parts)
        if degrees.ring > 1:
            steps, groups = layers * (degrees.ring - 1), _groups(mode, "ring", members)
            shift = links.shift(groups, self._key_bytes(mode, "ring", block, kind, entries) / steps)
            latency = links.shift(groups, 0.0)  # never hidden: both ends wait for each other in every step
            computing = attention / (degrees.sequence * degrees.tensor * degrees.ring) / layers
            waits += steps * (latency + max(0.0, shift - latency - computing))
        if degrees.tensor > 1:
            size = entries * sum(self._tokens(mode, kind)) * self.workload.sizes.token_bytes / degrees.sequence
            waits += SUMS * links.all_reduce(_groups(mode, "tensor", members), size)
        if degrees.patch > 1:
            seconds = links.exchange(_groups(mode, "patch", members), self._key_bytes(mode, "patch", block, kind, entries))
            waits, overlapped = (waits + seconds, 0.0) if kind is StepKind.EXACT else (waits, seconds)
        return waits, overlapped


def _of(cost: DeviceCost, block: str) -> BlockCost:
    return cost.blocks[list_of(block)]


def _groups(mode: Mode, axis: str, members: list[int]) -> list[list[int]]:
    """Return groups of `members` whose ranks differ only in this axis."""
    groups: dict[tuple, list[int]] = {}
    for rank in members:
        at = mode.degrees.coordinate(rank)
        others = tuple(getattr(at, other) for other in ("batch", "pipe", *SEQUENCE_AXES, "tensor") if other != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())
