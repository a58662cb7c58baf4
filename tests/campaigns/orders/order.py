"""The operations of each rank of a case, whether they can hang, and their digest."""

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from parallel_backend.core.degrees import AXES, Degrees
from testing import mini
from tests.support.strict.fabric import Fabric
from tests.support.strict.operation import Operation
from tests.support.strict.rules import TRIAL

from ..transport.cases import Case, product
from ..transport.runner import Trials, rules_of

FILE = Path(__file__).with_name("orders.json")
TIMINGS = rules_of(1, 0, 0.0), rules_of(8, 1, 0.002)


@dataclass(frozen=True)
class Posted:
    """An operation of a rank. `parts`: (peer, bytes to it, bytes from it)."""

    communicator: str
    kind: str
    parts: tuple[tuple[int, int, int], ...]

    def meets(self, rank: int, others: "dict[int, Posted]") -> bool:
        """Whether each peer's operation of `others` is the other end of this one of `rank`."""
        return all(
            peer in others
            and (self.communicator, self.kind) == (others[peer].communicator, others[peer].kind)
            and (rank, received, sent) in others[peer].parts
            for peer, sent, received in self.parts
        )


Orders = Sequence[Sequence[Posted]]
"""By rank, the operations in order of issue."""


def products() -> Iterator[Case]:
    """All products of the axes' sizes in which ranks talk. A call has two entries to split; stages and patches do not
    combine."""
    for sizes in itertools.product((1, 2), *[(1, 2, 4, 8)] * (len(AXES) - 1)):
        degrees = dict(zip(AXES, sizes, strict=True))
        if degrees["batch"] < math.prod(sizes) <= 8 and 1 in (degrees["pipe"], degrees["patch"]):
            yield product(Degrees(**degrees, patch_mode="displaced"), mini.CONFIG)


def posted(operation: Operation) -> Posted:
    parts = []
    for peer in sorted(operation.peers):
        sent, received = operation.sizes(peer)
        parts.append((peer, sum(size for size, _ in sent), sum(size for size, _ in received)))
    return Posted(str(operation.communicator), operation.kind, tuple(parts))


@contextlib.contextmanager
def recorded() -> Iterator[list[list[Posted]]]:
    """What ranks post within it, without the self-test's trials, which have a time limit. By rank."""
    orders: list[list[Posted]] = []
    issue = Fabric.issue

    def recording(fabric: Fabric, operation: Any, rank: int, *others: Any) -> Operation:
        issued = issue(fabric, operation, rank, *others)
        orders.extend([] for _ in range(len(orders), len(fabric.ranks)))
        if TRIAL not in issued.place:
            orders[rank].append(posted(issued))
        return issued

    with mock.patch.object(Fabric, "issue", recording):
        yield orders


def hang(orders: Orders) -> str:
    """What ranks wait at if no common order of all operations exists. Empty: there is one.

    All of a rank's work stops behind each operation until it has run, as on a device with one hardware queue, or behind the
    first launch of a kernel: the strictest timing that there is.
    """
    done = [0] * len(orders)
    while heads := {rank: order[n] for rank, (order, n) in enumerate(zip(orders, done, strict=True)) if n < len(order)}:
        ready = dict(heads)
        while apart := [rank for rank, operation in ready.items() if not operation.meets(rank, ready)]:
            for rank in apart:
                del ready[rank]
        if not ready:
            return "; ".join(f"rank {rank} waits at its operation {done[rank]}, {heads[rank]}" for rank in heads)
        for rank in ready:
            done[rank] += 1
    return ""


def digest(orders: Orders) -> str:
    """Of each rank's operations on each communicator. Their order between communicators may depend on timing."""
    found: dict[str, list[Any]] = {}
    for rank, order in enumerate(orders):
        for each in order:
            found.setdefault(f"rank {rank}, {each.communicator}", []).append((each.kind, each.parts))
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def check(at_work: Trials, case: Case) -> tuple[str, int, str]:
    """(digest, operations, what is wrong) of a case under all TIMINGS."""
    digests, count = [], 0
    for rules in TIMINGS:
        with recorded() as orders:
            wrong = at_work.trial(case, rules) or hang(orders)
        digests.append(digest(orders))
        count += sum(map(len, orders))
        if wrong:
            return digests[0], count, wrong
    return digests[0], count, "" if len(set(digests)) == 1 else f"the order depends on timing: {digests}"
