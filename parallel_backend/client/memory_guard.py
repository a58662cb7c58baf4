"""Asks the ranks for their memory before a model is loaded and once for each sampling run. If a run does not fit, weights
are streamed from host memory. If it still does not fit, it is refused."""

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from parallel_backend.core.setup import Setup
from parallel_backend.own_class.built.built_class import BuiltClass
from parallel_backend.placement.device_memory import DeviceMemory, device_memories
from parallel_backend.placement.gpu_overheads import COPY_RATE
from parallel_backend.placement.memory_check import MemoryCheck
from parallel_backend.placement.memory_model import KV_COPIES, Request
from parallel_backend.processes.failure_report import again
from parallel_backend.processes.failure_text import KILLED, out_of_memory
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import DeviceFull, Poll, RankError, wait_for
from parallel_backend.wire.diagnosis import DeviceMemoryReport, ReadMemory
from parallel_backend.wire.vae import DropVAE

from .adapter_room import AdapterRoom
from .call import Conditioning
from .conditioning_cache import CONDITIONINGS_KEPT
from .resident_weights import ResidentWeights

log = logging.getLogger(__name__)

LEAST_SHORT = 1 << 28
"""If a device ran out of memory, it is assumed to lack at least this many bytes. The failed allocation, or half of the run's
estimate, counts if it is larger. This is a guess: no GPU has run out so far."""

EXACT = 0
"""Stands for the number of a run, for calls outside of runs."""

Learnt = dict[Setup, dict[int, int]]
"""Setup -> rank -> most bytes of weights on its device, learned when it ran out of memory. Shared by a process's models.
Estimates of a run's memory are not measured, so a run that fits by them may still run out."""

MakeRoom = Callable[[str, int], int]
"""(local device such as cuda:0, bytes that it lacks) -> bytes that have become free. Provided by the program that has other
models on the device. Called on the thread that loads or samples."""


def no_room(device: str, missing: int) -> int:
    """Return a MakeRoom for a process without other models on the devices."""
    return 0


class MemoryGuard:
    """Fits one model's requests into its ranks' memory: by `make_room`, then by moving weights (`resident`) to the host."""

    def __init__(
        self,
        ranks: ModelRanks,
        memory_check: MemoryCheck,
        built: BuiltClass,
        make_room: MakeRoom = no_room,
        lock: AbstractContextManager | None = None,
        learnt: Learnt | None = None,
    ):
        """`lock`: see ResidentWeights. `learnt`: see Learnt. None: a new one for this model only."""
        self.ranks, self.memory_check, self.built, self.make_room, self._lock = ranks, memory_check, built, make_room, lock
        self.resident = ResidentWeights(ranks, memory_check.weights(), lock=lock)
        self.copy_rates = [0.0] * len(ranks.devices)
        """Bytes a second from host memory to each rank's device; 0.0 if no weights are streamed."""
        self._learnt: Learnt = {} if learnt is None else learnt
        self._learned: str | None = None  # see `learn`
        self.has_host = [False] * len(ranks.devices)
        """For each rank, whether its machine has separate host memory to which weights can move."""
        self._runs: dict[int, _Run] = {}
        self._of_last_run: set[tuple[Request, ...]] = set()
        self._of_this_run: set[tuple[Request, ...]] = set()
        self._since: set[Request] = set()  # whose calls may have run since ranks were last asked for their memory

    def make_room_for(self, requests: tuple[Request, ...], poll: Poll) -> None:
        """Ask for memory for the model and these requests, before blocks are timed and balanced by free memory."""
        self._with_room(requests, self._device_memories(poll), None)

    def check_weights(self, requests: tuple[Request, ...], poll: Poll) -> None:
        """Set the limits in `resident` for loading and for a run of these requests. Raises ValueError for too large
        weights."""
        memories = self._with_room(requests, self._device_memories(poll), None)
        self.memory_check.check_weights(memories)
        limits = self.memory_check.placed(requests, memories, most=self._most)
        self.resident = ResidentWeights(self.ranks, self.memory_check.weights(), limits, self._lock)

    @property
    def _most(self) -> dict[int, int]:
        """The entry of Learnt for this model's setup."""
        return self._learnt.get(self.memory_check.setup, {})

    @property
    def in_run(self) -> bool:
        """Whether a run with K/V buffers is in progress."""
        return any(run != EXACT for run in list(self._runs))

    def wake(self, poll: Poll) -> None:
        """Bring the weights that each rank needs to its device, see ResidentWeights.wake, after asking for memory. Raises
        ValueError, before anything moves, if there is still no room for them."""
        if self.resident.parked:
            memories = self._with_room((), self._device_memories(poll), self.resident.expected())
            self.memory_check.check_weights(memories)
            self.resident.wake()

    def adapter_room(self, poll: Poll) -> AdapterRoom:
        """Makes room for additions to the weights. It reads free memory when the first addition is sent."""
        read = functools.partial(self._device_memories, poll)
        return AdapterRoom(read, self.make_room, self.resident, self.memory_check)

    def adapted(self) -> None:
        """To be called after LoRA values were added to the weights or freed. The next call reads free memory, and brings
        back the weights that fit."""
        self._runs.pop(EXACT, None)

    def gave_way(self) -> None:
        """To be called after weights have left a device. The next call reads free memory, and brings back the weights that
        fit."""
        for run in list(self._runs.values()):  # a copy, since runs begin and end on other threads
            run.free.lose(self.resident.expected())
        self.refresh()

    def refresh(self) -> None:
        """Begin a sampling run: free memory is read again, because it may have changed since the last run."""
        self._runs.pop(EXACT, None)
        if self._of_this_run:
            self._of_last_run, self._of_this_run = self._of_this_run, set()

    def admit(self, conditioning: Conditioning, poll: Poll, timed: bool = False, added: int = 0) -> None:
        """Check an exact call before it is made. Raises ValueError if it cannot fit. `timed`, `added`: see
        memory_model.Request.

        Asks ranks for their memory only before a run's first call, because their answer waits for calls in progress.
        """
        if EXACT not in self._runs:
            self._runs[EXACT] = _Run(_FreeMemory(self._device_memories(poll), self.resident.expected()), 1, 0)
        self.check(EXACT, conditioning, timed, added)

    def watch(self, run: int, bands: int, extrapolate: bool, poll: Poll) -> None:
        """Begin a run in `bands` bands. `check` then checks its calls."""
        free = _FreeMemory(self._device_memories(poll), self.resident.expected())
        self._runs[run] = _Run(free, bands, KV_COPIES if extrapolate else 1)

    def check(self, run: int, conditioning: Conditioning, timed: bool = False, added: int = 0) -> None:
        """Check a call of a run before it is made. Raises ValueError if the run does not fit together with this
        conditioning.

        `timed`, `added`: see memory_model.Request. Does not wait for ranks, because other calls may be in progress.
        """
        known, key = self._runs.get(run), (conditioning.id, timed, added)
        if known is None or (key in known.requests and not self.resident.parked):
            return
        request = request_of(conditioning, self.built, known.kept, known.bands, timed, added)
        requests = dict([*known.requests.items(), (key, request)][-CONDITIONINGS_KEPT:])
        self._fit(tuple(requests.values()), known.free)
        known.requests = requests

    def copy_seconds(self) -> list[float]:
        """For each rank, seconds of copying the weights that it streams in a micro-step."""
        held = zip(self.resident.weights, self.resident.limits, self.copy_rates, strict=True)
        return [one.streamed(limit) / rate if rate else 0.0 for one, limit, rate in held]

    def forget(self, run: int) -> None:
        self._runs.pop(run, None)

    def explained(self, error: Exception) -> Exception:
        """Return the error. If memory ran out, figures and advice are added after its first line. It is unknown why the
        system ended a process: that error only mentions memory if the run needed much of it."""
        if KILLED in str(error) and not self.memory_check.is_short():
            return error
        if not isinstance(error, RankError) or not out_of_memory(str(error)) or not (advice := self.memory_check.advice()):
            return error
        first, *rest = str(error).split("\n", 1)
        said = again(error)  # of its kind
        said.args = ("\n".join((first, advice, *rest)),)
        return said

    def learn(self, error: DeviceFull) -> str:
        """Record that a device ran out of memory with this model: the next one with this setup streams more of that rank's
        weights.

        Returns a line for the user about the next try. Empty: nothing more can be streamed. A second call returns the same
        line.
        """
        if self._learned is None:
            self._learned = self._learn(error)
        return self._learned

    def _learn(self, error: DeviceFull) -> str:
        requests, memories = self.memory_check.last or ((), ())
        if (rank := self.ranks.place(error.rank)) is None:  # it ran out for another model
            return ""
        memory = next((each for each in memories if rank in each.ranks), None)
        weights, present = self.resident.weights[rank], self.resident.expected()[rank]
        if memory is None or not self.memory_check.streams(memory) or present <= weights.least:
            return ""
        short = max(error.asked, self.memory_check.memory(requests)[rank].run // 2, LEAST_SHORT)
        most = max(weights.least, present - short)
        self._learnt.setdefault(self.memory_check.setup, {})[rank] = most
        limit = self.resident.limits[rank]
        more, device = (weights.streamed(most) - weights.streamed(limit)) / 1e9, self.ranks.devices[rank]
        return (
            f"{device} ran out of memory. One more try with new ranks: {more:.1f} GB more of rank {error.rank}'s weights "
            "are streamed from host memory"
        )

    def _fit(self, requests: tuple[Request, ...], free: "_FreeMemory") -> None:
        """Move weights so that these requests fit, and update `free`. Raises ValueError if they cannot fit.

        Weights come back to a device with free memory. They stay out of memory that the last run's requests needed: the next
        conditioning would move them out again. Ranks move weights before they handle later calls.
        """
        self._since.update(requests)
        free.move_to(self.resident.expected())
        free.memories = self._with_room(requests, free.memories, self.resident.expected())
        present = self.resident.expected()
        placed = [self.memory_check.placed(requests, free.memories, present, self._most)]
        placed += [self.memory_check.placed(each, free.memories, present) for each in self._of_last_run]
        self._of_this_run.add(requests)
        limits = tuple(map(min, zip(*placed, strict=True)))
        expected = self.resident.expected(limits)
        free.move_to(expected)
        self.memory_check.check(requests, free.memories, expected)  # before anything moves
        if expected != present or self.resident.parked:
            self.resident.tell(limits)
            self.resident.wanted = tuple(map(max, self.resident.wanted, expected))
            log.info("Parallel DiT: %s", self.memory_check.said_of_streaming(limits) or "all weights stay on the devices")

    def _with_room(
        self, requests: tuple[Request, ...], memories: tuple[DeviceMemory, ...], resident: Sequence[int] | None
    ) -> tuple[DeviceMemory, ...]:
        """Free memory by dropping VAEs, then by `make_room`. Returns the memory afterwards. `resident`: see
        MemoryCheck.missing."""
        if any(memory.vae and self.memory_check.missing(requests, memory, resident) for memory in memories):
            self.ranks.tell(DropVAE())  # without waiting: ranks drop them before they handle later messages
            memories = tuple(_with_free(replace(memory, vae=0), memory.vae) for memory in memories)
        missing = [self.memory_check.missing(requests, memory, resident) for memory in memories]
        return tuple(
            _with_free(memory, self.make_room(memory.device, nbytes)) if nbytes else memory
            for memory, nbytes in zip(memories, missing, strict=True)
        )

    def _device_memories(self, poll: Poll) -> tuple[DeviceMemory, ...]:
        reports = wait_for(self.ranks.ask(ReadMemory(), DeviceMemoryReport), poll)
        taken = [report.working_bytes for report in reports]
        if self._since and any(taken):
            self.memory_check.learn(tuple(self._since), taken)
        self._since = {request for run in list(self._runs.values()) for request in run.requests.values()}
        memories = device_memories(self.ranks.devices, reports)
        for memory in memories:
            for rank in memory.ranks:
                self.has_host[rank] = memory.streams
                self.copy_rates[rank] = (memory.copy_rate or COPY_RATE) if self.memory_check.streams(memory) else 0.0
        return memories


def _with_free(memory: DeviceMemory, nbytes: int) -> DeviceMemory:
    """Return the memory with `nbytes` more free. Unchanged if its free bytes are unknown."""
    return memory if memory.free is None else replace(memory, free=memory.free + nbytes)


class _FreeMemory:
    """`memories`: the devices' memory while their ranks have `resident` bytes of weights on them."""

    def __init__(self, memories: tuple[DeviceMemory, ...], resident: Sequence[int]):
        self.memories, self._resident = memories, resident

    def move_to(self, resident: Sequence[int]) -> None:
        """Update `memories` for weights that were or will be loaded or freed."""
        moved = [before - now for before, now in zip(self._resident, resident, strict=True)]
        self._resident = resident
        self.memories = tuple(_with_free(memory, sum(moved[rank] for rank in memory.ranks)) for memory in self.memories)

    def lose(self, resident: Sequence[int]) -> None:
        """Record that weights were freed, and that another model or program has taken their memory."""
        self._resident = resident


class _Run:
    """A run. `free`: memory since it began. `kept`, `bands`: see memory_model.Request. `requests`: (conditioning, `timed`,
    `added`) of its calls -> request."""

    def __init__(self, free: _FreeMemory, bands: int, kept: int):
        self.free, self.bands, self.kept = free, bands, kept
        self.requests: dict[tuple[int, bool, int], Request] = {}


def request_of(
    conditioning: Conditioning, built: BuiltClass, kept: int = 0, bands: int = 1, timed: bool = False, added: int = 0
) -> Request:
    """Return the memory model's record for calls with this conditioning. Other arguments: see memory_model.Request."""
    layout = conditioning.layout
    counted = built.counted(layout.grid, conditioning.text_tokens, conditioning.tensors)
    return Request(
        counted.grid,
        conditioning.token_order.references,
        counted.text,
        conditioning.batch,
        conditioning.first_replica,
        kept,
        bands,
        built.patching.cut(layout.along).band_dim,
        timed,
        conditioning.changes.together,
        added,
        counted.streams,
    )
