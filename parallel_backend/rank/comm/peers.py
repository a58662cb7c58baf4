"""A rank's connection to the other ranks of its pool. It joins them, and creates and tests process groups."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.wire.rank_settings import RankSettings

from .guard import Guard
from .mesh import Axis, Mesh, close_mesh, make_mesh
from .process_group import backend_for, is_far, join
from .rendezvous import Rendezvous
from .self_test import (
    SHORT_SUMS,
    SUMS,
    LinkError,
    open_communicator,
    rounds,
    try_all_to_all,
    try_link,
    try_pair,
    try_sum,
)
from .transfers import PeerErrors, is_out_of_memory


class Peers:
    """The other ranks of a pool or of a part of it. All methods but `check`, `blocked` and `part` are collective over the
    pool.

    They raise StoreError if the rendezvous is gone, PeerError if another rank is; the client then looks for the rank at
    fault. During all of them the client's watchdog sees this rank as waiting.
    """

    def __init__(self, settings: RankSettings, rendezvous: Rendezvous, guard: Guard, ranks: tuple[int, ...] | None = None):
        """`ranks`: see `part`. None: the whole pool."""
        self.ranks = tuple(range(len(settings.devices))) if ranks is None else ranks
        self.place = self.ranks.index(settings.rank) if settings.rank in self.ranks else None
        """This rank's number among `ranks`. None: it is not one of them."""
        self._is_part = ranks is not None
        self._parts: dict[tuple[int, ...], Peers] = {}
        self._settings, self._rendezvous, self._guard = settings, rendezvous, guard
        self._backend = "gloo" if settings.self_test.transport.gloo else backend_for(settings.devices)
        self._device = torch.device(settings.device if self._backend == "nccl" else "cpu")
        self._meshes: dict[Degrees, Mesh] = {}
        self._users: Counter[Degrees] = Counter()
        self._far = False  # see Axis.far

    def part(self, ranks: tuple[int, ...]) -> "Peers":
        """Return the peers for models on these ranks of the pool, ascending. Empty: on all ranks. All ranks of the pool
        create and end its meshes. Other collective methods are collective over `ranks`."""
        if ranks in ((), self.ranks):
            return self
        if ranks not in self._parts:
            own = self._rendezvous.part(ranks) if self._settings.rank in ranks else self._rendezvous
            self._parts[ranks] = part = Peers(self._settings, own, self._guard, ranks)
            part._far = self._far
        return self._parts[ranks]

    def check(self) -> None:
        """Raise StoreError if the rendezvous is gone. To be called before ranks need it."""
        self._rendezvous.check()

    def join(self) -> None:
        """Join the process group of all ranks, and test it. A single rank has none."""
        settings, world = self._settings, len(self._settings.devices)
        if world == 1:
            return
        with self._guard.waiting():
            join(settings.rank, settings.devices, self._rendezvous, settings.timeout, settings.self_test.transport)
            # The same on all ranks. One that cannot name its interface does not know that the others are far.
            self._far = any(far for (far,) in self._rendezvous.tell_all(settings.rank, [is_far()]))
        everyone = Axis("world", world, settings.rank, tuple(range(world)), None)
        self._try_axis(everyone, "all ranks", SHORT_SUMS[self._device.type])

    def enter_mesh(self, degrees: Degrees) -> Mesh:
        """The mesh of a model. Models of equal degrees share one, because each NCCL group takes memory on the device."""
        if degrees not in self._meshes:
            self._meshes[degrees] = self._make_mesh(degrees)
        self._users[degrees] += 1
        return self._meshes[degrees]

    def leave_mesh(self, degrees: Degrees) -> None:
        """A model of these degrees is unloaded. If it was the last one, the mesh's groups are destroyed."""
        self._users[degrees] -= 1
        if not self._users[degrees]:
            with self._guard.waiting(), PeerErrors():
                close_mesh(self._meshes.pop(degrees), self._rendezvous.meet if self._is_part else None)

    def _make_mesh(self, degrees: Degrees) -> Mesh:
        """Return a new mesh whose groups are tested."""
        with self._guard.waiting():
            self._rendezvous.check()
            with PeerErrors():
                mesh = make_mesh(degrees, self.place, self._settings.timeout, self._far, self.ranks)
            if self.place is None:
                return mesh
            self._rendezvous.meet()
        for axis in mesh.axes.values():
            if axis.group is not None:
                sums = SUMS[self._device.type] if axis.name == "tensor" else ()  # no other axis adds up
                self._try_axis(axis, f"the {axis.name} axis of {self._named(*axis.ranks)}", sums)
        stage = mesh.axes["pipe"].index
        for half in range(2 if degrees.pipe > 1 else 0):  # the links from even stages, then those from odd ones
            for link in mesh.links:
                if (stage if link.sends else stage - 1) % 2 == half:
                    with self._trial(f"the link {'to' if link.sends else 'from'} {self._named(link.peer)}"):
                        try_link(link, self._device)
            self._meet()
        return mesh

    def _try_axis(self, axis: Axis, name: str, sums: Sequence[int]) -> None:
        """Test all transfers that the axis uses. Collective over all ranks, each on its own part of the axis. `sums`: sizes
        for try_sum."""
        with self._trial(f"the communicator of {name}"):
            open_communicator(axis, self._device)
        for pairs in rounds(axis.size):
            for pair in pairs:
                if axis.index in pair:
                    other = pair[axis.index == pair[0]]
                    two = f"{self._named(axis.ranks[pair[0]])} and {self._named(axis.ranks[pair[1]])}"
                    with self._trial(f"a transfer between {two}, on {name},"):
                        try_pair(axis, other, self._device)
            self._meet()
        with self._trial(f"an all-to-all over {name}"):
            try_all_to_all(axis, self._device)
        for values in sums:
            with self._trial(f"a sum over {name}"):
                try_sum(axis, values, self._device)

    def _meet(self) -> None:
        """Wait at the rendezvous, without a time limit, until all ranks have ended this test. A rank that began the next
        test early would report a broken link to a rank that is still in this one."""
        with self._guard.waiting():
            self._rendezvous.check()
            self._rendezvous.meet()

    def tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers that each of `ranks` passes, in their order. Uses the rendezvous, because a part of a pool has
        no communicator."""
        assert self.place is not None
        with self._guard.waiting():
            return self._rendezvous.tell_all(self.place, numbers)

    def blocked(self) -> AbstractContextManager[None]:
        """Context for waiting for ranks without a transfer. If one of them is gone, the client ends this rank."""
        return self._guard.heartbeat.blocked()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context for a collective that may be the first since the ranks were idle. Checks the rendezvous first."""
        with self._guard.waiting():
            self._rendezvous.check()
            with PeerErrors():
                yield

    @contextlib.contextmanager
    def _trial(self, what: str) -> Iterator[None]:
        """Context of one test: raises LinkError if it fails or takes longer than the limit. `what`: the transfer, for the
        message."""
        limits = self._settings.self_test
        error: Callable[[str], LinkError] = lambda how: LinkError(what, how, self._backend)  # noqa: E731
        with self._guard.waiting(limits.seconds, lambda: error(f"did not end within {limits.seconds:g} s")):
            try:
                yield
            except ValueError as wrong:
                raise error(str(wrong)) from wrong
            except RuntimeError as failed:  # also of CUDA, which fails to map another GPU's memory
                if is_out_of_memory(failed):
                    raise
                raise error(f"failed ({failed})") from failed

    def _named(self, *ranks: int) -> str:
        names = [f"{rank} ({self._settings.devices[rank]})" for rank in ranks]
        return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
