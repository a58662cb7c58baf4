"""Some of a pool's ranks, used by a model or VAE that needs fewer devices than the pool has."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.wire.shared_memory import Segment

from .pool import Pool


class PoolPart:
    """Behaves like a Pool of these ranks alone. They are numbered 0, 1, ... in the order of the pool.

    `part_ranks`: their rank numbers in the pool, ascending. `threads`: CPU threads of each for the part's models; None: the
    number with which the ranks were started. Members without a docstring: see Pool.
    """

    number: int | None = None
    """Number of the model that these ranks' messages are about."""

    def __init__(self, whole: Pool, part_ranks: tuple[int, ...], threads: int | None = None):
        self.whole, self.part_ranks, self.threads = whole, part_ranks, threads or whole.threads
        self.devices = tuple(whole.devices[rank] for rank in part_ranks)
        self.self_test, self.process, self.segments = whole.self_test, whole.process, whole.segments

    @property
    def error(self) -> Exception | None:
        return self.whole.error

    @property
    def ready(self) -> Future:
        return self.whole.ready

    @property
    def notes(self) -> tuple[str, ...]:
        return self.whole.notes

    def place(self, rank: int) -> int | None:
        return self.part_ranks.index(rank) if rank in self.part_ranks else None

    def doing(self, rank: int) -> str:
        return self.whole.doing(self.part_ranks[rank])

    def send(self, rank: int, message: Any, request_id: int | None = None) -> None:
        self.whole.send(self.part_ranks[rank], message, request_id, self.number)

    def send_each(self, messages: Iterable[tuple[int, Any]]) -> None:
        self.whole.send_each([(self.part_ranks[rank], message) for rank, message in messages], None, self.number)

    def lends_to(self, rank: int) -> bool:
        return self.whole.lends_to(self.part_ranks[rank])

    def lend(self, rank: int, segment: Segment) -> None:
        self.whole.lend(self.part_ranks[rank], segment, self.number)

    def drop(self, rank: int, segment: Segment) -> None:
        self.whole.drop(self.part_ranks[rank], segment)

    def forget(self, rank: int, segment: Segment) -> None:
        self.whole.forget(self.part_ranks[rank], segment)

    def ask(self, message: Any, reply: type) -> Future:
        return self.whole.ask(message, reply, self.number, self.part_ranks)

    def ask_each(self, messages: Sequence[Any], reply: type) -> Future:
        return self.whole.ask_each(messages, reply, self.number, self.part_ranks)

    def tell(self, message: Any) -> None:
        self.whole.tell(message, self.number, self.part_ranks)

    def refuse(self, rank: int, why: str) -> Exception:
        return self.whole.refuse(self.part_ranks[rank], why)


SomeRanks = Pool | PoolPart


def can_be_shared(devices: tuple[str, ...]) -> bool:
    """Whether a part of a pool's ranks on these devices would use the same backend for transfers as a pool on only its
    devices."""
    if any(map(on_ray, devices)):  # which may be the same devices
        return False
    kinds = set(map(device_kind, devices))
    return kinds == {"cpu"} or (kinds == {"cuda"} and len(set(devices)) == len(devices))


def ranks_on(devices: tuple[str, ...], of: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return which ranks of a pool on the devices `of` are on `devices`, in the order of `devices`; None if there are none
    such. Their numbers ascend, because process groups number their ranks in the pool's order."""
    if devices == of:
        return tuple(range(len(of)))
    if not (can_be_shared(devices) and can_be_shared(of)):
        return None
    ranks: list[int] = []
    for device in devices:
        after = ranks[-1] + 1 if ranks else 0
        if device not in of[after:]:
            return None
        ranks.append(of.index(device, after))
    return tuple(ranks)


def union(sets: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return devices for a pool that contains each of these sets of devices as a part. None if there is no such pool, for
    example because the sets have their devices in different orders."""
    if not all(map(can_be_shared, sets)):
        return None
    names = list(dict.fromkeys(name for each in sets for name in each))
    counts = {name: max(each.count(name) for each in sets) for name in names}
    for order in (sorted(names, key=_number), names):
        found = tuple(name for name in order for _ in range(counts[name]))
        if all(ranks_on(each, found) is not None for each in sets):
            return found
    return None


def _number(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    return kind, int(index or 0)
