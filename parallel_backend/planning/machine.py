"""A machine in few numbers: what a block costs on each device, and what a transfer between them costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .links import Link


@dataclass(frozen=True)
class BlockCost:
    """Seconds of a block: `fixed` + `token` * (queries + `pairs` * queries * keys), of one batch entry.

    `pairs` is what a key costs a query beside the query's linear layers, by arithmetic: see `pairs_of`.
    """

    fixed: float
    token: float
    pairs: float

    def work(self, queries: float, keys: float) -> float:
        """Seconds beside the fixed ones."""
        return self.token * (queries + self.pairs * queries * keys)

    def attention(self, queries: float, keys: float) -> float:
        """The part of `work` that the keys cause."""
        return self.token * self.pairs * queries * keys


LEAST_GROWTH = 0.05
"""Share of the longer sequence's seconds that are taken to grow with the tokens, at least."""


def pairs_of(hidden: int) -> float:
    """A block's linear layers are 12 h^2 weights, so 24 h^2 operations for a token; its attention 4 h a query and key."""
    return 1 / (6 * hidden)


def through(times: Sequence[tuple[int, float]], pairs: float) -> BlockCost:
    """The cost that takes these (tokens, seconds), of a shorter and a longer sequence.

    Neither part comes out negative, and a little grows with the tokens: a GPU that neither sequence has filled shows no
    growth, and a longer one would seem to cost nothing.
    """
    (short, quick), (long, slow) = sorted(times)
    sizes = [tokens * (1 + pairs * tokens) for tokens in (short, long)]
    most = slow / sizes[1]
    slope = min(most, max(LEAST_GROWTH * most, (slow - quick) / (sizes[1] - sizes[0])))
    return BlockCost(max(0.0, slow - slope * sizes[1]), slope, pairs)


@dataclass(frozen=True)
class Device:
    """`blocks`: block list -> cost of one of its blocks; `around`: of all that is not in a block. `memory`: bytes that are
    free for a run; None: the host's, which all CPU ranks share.
    """

    name: str
    kind: str
    blocks: dict[str, BlockCost]
    around: BlockCost
    memory: int | None


@dataclass(frozen=True)
class Links:
    """`between`: two devices, the lower one first -> their link, the others idle.

    `crowding`: how many times slower links are when all devices send at once. `sockets`: how many devices, counted from the
    first one, share a side of a bridge that takes `bridge` bytes a second each way, whoever they are for; 0: no bridge.
    """

    between: dict[tuple[int, int], Link]
    crowding: float = 1.0
    socket: int = 0
    bridge: float = 0.0

    def link(self, one: int, two: int) -> Link:
        """As it is while every device sends."""
        alone = self.between[min(one, two), max(one, two)]
        return Link(alone.latency, alone.bandwidth / self.crowding)

    def crosses(self, one: int, two: int) -> bool:
        return bool(self.socket) and one // self.socket != two // self.socket

    def send(self, one: int, two: int, size: float) -> float:
        """Seconds of a transfer of one pair."""
        crossing = size / self.bridge if self.crosses(one, two) else 0.0
        return max(self.link(one, two).seconds(size), crossing)

    def exchange(self, groups: Iterable[Sequence[int]], size: float) -> float:
        """Seconds in which every device of every group sends `size` bytes, evenly to the others of its group."""
        slowest, crossing = 0.0, [0.0, 0.0]
        for group in groups:
            part = size / (len(group) - 1)
            for one in group:
                ways = [(self.link(one, two), self.crosses(one, two)) for two in group if two != one]
                seconds = max(link.latency for link, _ in ways) + sum(part / link.bandwidth for link, _ in ways)
                slowest = max(slowest, seconds)
                crossing[one // self.socket % 2 if self.socket else 0] += part * sum(far for _, far in ways)
        return max(slowest, max(crossing) / self.bridge if self.bridge else 0.0)

    def shift(self, groups: Iterable[Sequence[int]], size: float) -> float:
        """Seconds in which every device of every group sends `size` bytes to the next one, the last to the first."""
        slowest, crossing = 0.0, 0
        for group in groups:
            ring = list(pairwise([*group, group[0]]))
            slowest = max(slowest, *(self.link(*pair).seconds(size) for pair in ring))
            crossing += sum(self.crosses(*pair) for pair in ring) / 2  # as many one way as the other
        return max(slowest, crossing * size / self.bridge if self.bridge else 0.0)

    def add_up(self, groups: Sequence[Sequence[int]], size: float) -> float:
        """Seconds in which every group adds up tensors of `size` bytes, one of each device, so that all have the sum."""
        count = len(groups[0])
        return 2 * (count - 1) * self.shift(groups, size / count)


@dataclass(frozen=True)
class Machine:
    """`devices` in the order of the ranks. `host_free`: bytes of memory that CPU ranks share; None: unknown.

    `hop`: seconds from a model call's output to the next call's start.
    """

    devices: tuple[Device, ...]
    links: Links
    host_free: int | None = None
    hop: float = 0.0

    def first(self, count: int) -> "Machine":
        return replace(self, devices=self.devices[:count])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)


def alike(devices: int, link: Link) -> dict[tuple[int, int], Link]:
    """Links of which all are equal."""
    return {(one, two): link for one in range(devices) for two in range(one + 1, devices)}
