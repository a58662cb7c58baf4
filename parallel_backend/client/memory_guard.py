"""Asks the ranks for their memory before a model is loaded and once for each sampling run. Refuses what cannot fit."""

from collections.abc import Callable
from dataclasses import replace

import torch

from parallel_backend.client.placement.memory_check import DeviceMemory, MemoryCheck, device_memories
from parallel_backend.client.placement.memory_model import KV_COPIES, Request
from parallel_backend.families import Family
from parallel_backend.processes.failure_text import out_of_memory
from parallel_backend.processes.pool import Poll, Pool, RankError, wait_for
from parallel_backend.wire.diagnosis import RankMemory, ReadMemory

from .call import Conditioning
from .conditioning_cache import CONDITIONINGS_KEPT

MakeRoom = Callable[[str, int], int]
"""(device of this machine such as cuda:0, bytes that are missing there) -> bytes that have come free. It is for whoever has
models of its own on that device; called on the thread of whoever loads or samples."""


def no_room(device: str, missing: int) -> int:
    """A MakeRoom for a process that has nothing on the devices."""
    return 0


class MemoryGuard:
    """For one model on the ranks of `pool`. `make_room` is asked before anything is refused."""

    def __init__(self, pool: Pool, memory_check: MemoryCheck, family: Family, make_room: MakeRoom = no_room):
        self.pool, self.memory_check, self.family, self.make_room = pool, memory_check, family, make_room
        self._runs: dict[int, _Run] = {}
        self._found: tuple[DeviceMemory, ...] | None = None  # for exact calls, since `refresh`
        self._admitted: set[Request] = set()

    def make_room_for(self, requests: tuple[Request, ...], poll: Poll) -> None:
        """Before blocks are timed and cut, which goes by what is free: ask for room for the model and these requests."""
        if any(device.startswith("cuda") for device in self.pool.devices):
            self._with_room(requests, self._device_memories(poll), loaded=False)

    def check_weights(self, poll: Poll) -> None:
        """Before loading, once its blocks are cut. ValueError if a rank has no room for its weights."""
        self.memory_check.check_weights(self._with_room((), self._device_memories(poll), loaded=False))

    def refresh(self) -> None:
        """A sampling run begins: what is free may have changed since the last one."""
        self._found = None
        self._admitted.clear()

    def admit(self, conditioning: Conditioning, poll: Poll, timed: bool = False) -> None:
        """Before an exact call: ValueError if it cannot fit. `timed`: see memory_model.Request.

        The ranks are asked before the first one alone: they answer in turn, and a second prompt's call is made while the
        first one's is under way. Exact calls leave nothing behind.
        """
        request = request_of(conditioning, self.family, timed=timed)
        if request in self._admitted:
            return
        if self._found is None:
            self._found = self._device_memories(poll)
        self._found = self._with_room((request,), self._found)
        self.memory_check.check((request,), self._found)
        self._admitted.add(request)

    def watch(self, run: int, bands: int, extrapolate: bool, poll: Poll) -> None:
        """A run in `bands` begins, whose calls `check` looks at."""
        self._runs[run] = _Run(self._device_memories(poll), bands, KV_COPIES if extrapolate else 1)

    def check(self, run: int, conditioning: Conditioning, timed: bool = False) -> None:
        """Before a call of a run: ValueError if what it keeps and computes with this conditioning too cannot fit.

        `timed`: see memory_model.Request.

        Does not wait for ranks, since other calls may be under way.
        """
        known = self._runs.get(run)
        if known is None or conditioning.id in known.requests:
            return
        known.requests[conditioning.id] = request_of(conditioning, self.family, known.kept, known.bands, timed)
        for dropped in list(known.requests)[:-CONDITIONINGS_KEPT]:
            del known.requests[dropped]
        requests = tuple(known.requests.values())
        known.found = self._with_room(requests, known.found)
        self.memory_check.check(requests, known.found)

    def forget(self, run: int) -> None:
        self._runs.pop(run, None)

    def explained(self, error: Exception) -> Exception:
        """A rank's error, with figures and a way out behind its first line if it is that memory ran out."""
        if not isinstance(error, RankError) or not out_of_memory(str(error)) or not (advice := self.memory_check.advice()):
            return error
        first, *rest = str(error).split("\n", 1)
        return RankError("\n".join((first, advice, *rest)))

    def _with_room(
        self, requests: tuple[Request, ...], found: tuple[DeviceMemory, ...], loaded: bool = True
    ) -> tuple[DeviceMemory, ...]:
        """`found`, with what `make_room` has freed on the GPUs of this machine. `loaded`: see MemoryCheck.missing."""
        rooms = []
        for room in found:
            missing = self.memory_check.missing(requests, room, loaded) if room.device.startswith("cuda") else 0
            rooms.append(replace(room, free=room.free + self.make_room(room.device, missing)) if missing else room)
        return tuple(rooms)

    def _device_memories(self, poll: Poll) -> tuple[DeviceMemory, ...]:
        return device_memories(self.pool.devices, wait_for(self.pool.ask(ReadMemory(), RankMemory), poll))


class _Run:
    """`found`: what was free when it began; `kept`, `bands`: see memory_model.Request; `requests`: by conditioning."""

    def __init__(self, found: tuple[DeviceMemory, ...], bands: int, kept: int):
        self.found, self.bands, self.kept = found, bands, kept
        self.requests: dict[int, Request] = {}


def request_of(conditioning: Conditioning, family: Family, kept: int = 0, bands: int = 1, timed: bool = False) -> Request:
    """What memory goes by, for calls with this conditioning. `kept`, `bands`, `timed`: see memory_model.Request."""
    return Request(
        conditioning.grid,
        conditioning.token_order.references,
        conditioning.text_tokens,
        family.image_padding(conditioning.grid),
        conditioning.batch,
        conditioning.first_replica,
        max((tensor.shape[1] for name, tensor in conditioning.tensors.items() if _is_text(name, tensor, family)), default=0),
        kept,
        bands,
        timed,
        conditioning.changes.together,
    )


def _is_text(name: str, tensor: torch.Tensor, family: Family) -> bool:
    """Of tokens that blocks look at, [B, T, width]."""
    return name in family.inputs.vector_tensors and tensor.ndim == 3
