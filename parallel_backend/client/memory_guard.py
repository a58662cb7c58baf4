"""Asks the ranks for their memory before a model is loaded and once for each sampling run.

What does not fit beside weights has them streamed from host memory; what cannot fit even so is refused.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from parallel_backend.families import Family
from parallel_backend.placement.device_memory import DeviceMemory, device_memories
from parallel_backend.placement.gpu_overheads import COPY_RATE
from parallel_backend.placement.memory_check import MemoryCheck
from parallel_backend.placement.memory_model import KV_COPIES, Request
from parallel_backend.processes.failure_text import out_of_memory
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Poll, RankError, wait_for
from parallel_backend.wire.diagnosis import DeviceMemoryReport, ReadMemory
from parallel_backend.wire.vae import DropVAE

from .call import Conditioning
from .conditioning_cache import CONDITIONINGS_KEPT
from .resident_weights import ResidentWeights

log = logging.getLogger(__name__)

MakeRoom = Callable[[str, int], int]
"""(device of this machine such as cuda:0, bytes that are missing there) -> bytes that have come free. It is for whoever has
models of its own on that device; called on the thread of whoever loads or samples."""


def no_room(device: str, missing: int) -> int:
    """A MakeRoom for a process that has nothing on the devices."""
    return 0


class MemoryGuard:
    """For one model on its `ranks`. `make_room` is asked first, then weights leave the devices, as far as `resident`
    says where they are; what cannot fit all the same is refused.
    """

    def __init__(
        self,
        ranks: ModelRanks,
        memory_check: MemoryCheck,
        family: Family,
        make_room: MakeRoom = no_room,
        lock: AbstractContextManager | None = None,
    ):
        """`lock`: see ResidentWeights."""
        self.ranks, self.memory_check, self.family, self.make_room, self._lock = ranks, memory_check, family, make_room, lock
        self.resident = ResidentWeights(ranks, memory_check.weights(), lock=lock)
        self.copy_rates = [0.0] * len(ranks.devices)
        """By rank, bytes a second from host memory to its device; 0.0 where no weights are streamed."""
        self.has_host = [False] * len(ranks.devices)
        """By rank, whether there is host memory beside its device's, for weights to go to."""
        self._runs: dict[int, _Run] = {}
        self._found: _Found | None = None  # for exact calls, since `refresh`
        self._admitted: set[Request] = set()
        self._of_last_run: set[tuple[Request, ...]] = set()
        self._of_this_run: set[tuple[Request, ...]] = set()

    def make_room_for(self, requests: tuple[Request, ...], poll: Poll) -> None:
        """Before blocks are timed and cut, which goes by what is free: ask for room for the model and these requests."""
        self._with_room(requests, self._device_memories(poll), None)

    def check_weights(self, requests: tuple[Request, ...], poll: Poll) -> None:
        """Before loading, once its blocks are cut, for a run of these requests. ValueError if a rank has no room for its
        weights. `resident` then has the limits to load with.
        """
        found = self._with_room(requests, self._device_memories(poll), None)
        self.memory_check.check_weights(found)
        limits = self.memory_check.placed(requests, found)
        self.resident = ResidentWeights(self.ranks, self.memory_check.weights(), limits, self._lock)

    @property
    def in_run(self) -> bool:
        """A run that keeps something from call to call is under way."""
        return bool(self._runs)

    def wake(self, poll: Poll) -> None:
        """Ranks that lack weights on their device get those that they cannot compute without, see ResidentWeights.wake; room
        is asked for."""
        if self.resident.parked:
            self._with_room((), self._device_memories(poll), self.resident.expected())
            self.resident.wake()

    def gave_way(self) -> None:
        """Somebody else has what these weights had of a device. The next call looks at what is free there, and takes back
        what it can."""
        for run in list(self._runs.values()):  # they begin and end on other threads
            run.found.lose(self.resident.expected())
        self.refresh()

    def refresh(self) -> None:
        """A sampling run begins: what is free may have changed since the last one."""
        self._found = None
        self._admitted.clear()
        if self._of_this_run:
            self._of_last_run, self._of_this_run = self._of_this_run, set()

    def admit(self, conditioning: Conditioning, poll: Poll, timed: bool = False) -> None:
        """Before an exact call: ValueError if it cannot fit. `timed`: see memory_model.Request.

        The ranks are asked before the first one alone: they answer in turn, and a second prompt's call is made while the
        first one's is under way. Exact calls leave nothing behind.
        """
        request = request_of(conditioning, self.family, timed=timed)
        if request in self._admitted:
            return
        if self._found is None:
            self._found = _Found(self._device_memories(poll), self.resident.expected())
        self._fit((request,), self._found)
        self._admitted.add(request)

    def watch(self, run: int, bands: int, extrapolate: bool, poll: Poll) -> None:
        """A run in `bands` begins, whose calls `check` looks at."""
        found = _Found(self._device_memories(poll), self.resident.expected())
        self._runs[run] = _Run(found, bands, KV_COPIES if extrapolate else 1)

    def check(self, run: int, conditioning: Conditioning, timed: bool = False) -> None:
        """Before a call of a run: ValueError if what it keeps and computes with this conditioning too cannot fit.

        `timed`: see memory_model.Request.

        Does not wait for ranks, since other calls may be under way.
        """
        known = self._runs.get(run)
        if known is None or (conditioning.id in known.requests and not self.resident.parked):
            return
        known.requests[conditioning.id] = request_of(conditioning, self.family, known.kept, known.bands, timed)
        for dropped in list(known.requests)[:-CONDITIONINGS_KEPT]:
            del known.requests[dropped]
        self._fit(tuple(known.requests.values()), known.found)

    def copy_seconds(self) -> list[float]:
        """By rank, of the weights that each micro-step brings to its device."""
        held = zip(self.resident.weights, self.resident.limits, self.copy_rates, strict=True)
        return [one.streamed(limit) / rate if rate else 0.0 for one, limit, rate in held]

    def forget(self, run: int) -> None:
        self._runs.pop(run, None)

    def explained(self, error: Exception) -> Exception:
        """A rank's error, with figures and a way out behind its first line if it is that memory ran out."""
        if not isinstance(error, RankError) or not out_of_memory(str(error)) or not (advice := self.memory_check.advice()):
            return error
        first, *rest = str(error).split("\n", 1)
        return RankError("\n".join((first, advice, *rest)))

    def _fit(self, requests: tuple[Request, ...], found: "_Found") -> None:
        """Have room for these requests, or raise ValueError. `found` then has what is free beside the weights that stay.

        A device that has more room than they need gets weights back, but no more than the last run left room for: the next
        conditioning would have them leave again. Ranks do what they are told before the calls that come after it.
        """
        found.move_to(self.resident.expected())
        found.memories = self._with_room(requests, found.memories, self.resident.expected())
        present = self.resident.expected()
        placed = [self.memory_check.placed(each, found.memories, present) for each in (requests, *self._of_last_run)]
        self._of_this_run.add(requests)
        limits = tuple(map(min, zip(*placed, strict=True)))
        expected = self.resident.expected(limits)
        found.move_to(expected)
        self.memory_check.check(requests, found.memories, expected)  # before anything moves
        if expected != present or self.resident.parked:
            self.resident.tell(limits)
            self.resident.wanted = tuple(map(max, self.resident.wanted, expected))
            log.info("Parallel DiT: %s", self.memory_check.said_of_streaming(limits) or "all weights stay on the devices")

    def _with_room(
        self, requests: tuple[Request, ...], found: tuple[DeviceMemory, ...], resident: Sequence[int] | None
    ) -> tuple[DeviceMemory, ...]:
        """`found`, with what parts of VAEs and then `make_room` have freed there. `resident`: see MemoryCheck.missing."""
        if any(memory.vae and self.memory_check.missing(requests, memory, resident) for memory in found):
            self.ranks.tell(DropVAE())  # nobody waits: ranks do it before what they are sent from now on
            found = tuple(
                memory if memory.free is None else replace(memory, free=memory.free + memory.vae, vae=0) for memory in found
            )
        memories = []
        for memory in found:
            missing = self.memory_check.missing(requests, memory, resident)
            if missing and memory.free is not None:
                memory = replace(memory, free=memory.free + self.make_room(memory.device, missing))
            memories.append(memory)
        return tuple(memories)

    def _device_memories(self, poll: Poll) -> tuple[DeviceMemory, ...]:
        found = device_memories(self.ranks.devices, wait_for(self.ranks.ask(ReadMemory(), DeviceMemoryReport), poll))
        for memory in found:
            for rank in memory.ranks:
                self.has_host[rank] = memory.streams
                self.copy_rates[rank] = (memory.copy_rate or COPY_RATE) if self.memory_check.streams(memory) else 0.0
        return found


class _Found:
    """`memories`: what is free beside the weights that each rank's device has, which is `resident` bytes."""

    def __init__(self, memories: tuple[DeviceMemory, ...], resident: Sequence[int]):
        self.memories, self._resident = memories, resident

    def move_to(self, resident: Sequence[int]) -> None:
        """Weights have come or gone since, or are about to."""
        moved = [before - now for before, now in zip(self._resident, resident, strict=True)]
        self._resident = resident
        self.memories = tuple(
            memory if memory.free is None else replace(memory, free=memory.free + sum(moved[rank] for rank in memory.ranks))
            for memory in self.memories
        )

    def lose(self, resident: Sequence[int]) -> None:
        """Weights have gone since, and somebody else has their room."""
        self._resident = resident


class _Run:
    """`found`: what was free when it began; `kept`, `bands`: see memory_model.Request; `requests`: by conditioning."""

    def __init__(self, found: _Found, bands: int, kept: int):
        self.found, self.bands, self.kept = found, bands, kept
        self.requests: dict[int, Request] = {}


def request_of(conditioning: Conditioning, family: Family, kept: int = 0, bands: int = 1, timed: bool = False) -> Request:
    """What memory goes by, for calls with this conditioning. `kept`, `bands`, `timed`: see memory_model.Request."""
    return Request(
        conditioning.layout.grid,
        conditioning.token_order.references,
        conditioning.text_tokens,
        family.image_padding(conditioning.layout.grid),
        conditioning.batch,
        conditioning.first_replica,
        max((tensor.shape[1] for name, tensor in conditioning.tensors.items() if _is_text(name, tensor, family)), default=0),
        kept,
        bands,
        family.patching.cut(conditioning.layout.along).band_dim,
        timed,
        conditioning.changes.together,
    )


def _is_text(name: str, tensor: torch.Tensor, family: Family) -> bool:
    """Of tokens that blocks look at, [B, T, width]."""
    return name in family.inputs.vector_tensors and tensor.ndim == 3
