"""Whether a model, or a run of it, fits its ranks' devices. Asked before anything is allocated; the answer names the widgets
that would change it.

Weights, keys and values, and the hidden states that every block has are certain: a run that has no room for them is refused.
The whole estimate may be off by half: where only that does not fit, a warning is logged.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.wire.diagnosis import RankMemory

from .memory_advice import Capacity, changes
from .memory_model import USABLE_MEMORY, MemoryNeed, Request, memory_of, model_sizes

log = logging.getLogger(__name__)

TARGET_SHARE = 0.75
"""A run that ran out of memory is told what would take this part of its estimate."""


@dataclass(frozen=True)
class DeviceMemory:
    """One memory that `ranks` share, on `device`; all figures are bytes.

    `free`: free to these ranks, None where unknown. `held`: taken by their model. `total`: None where unknown.
    """

    device: str
    ranks: tuple[int, ...]
    free: int | None
    held: int
    total: int | None

    @property
    def of_gpu(self) -> bool:
        return "cuda" in self.device

    @property
    def name(self) -> str:
        """How a message calls it."""
        if self.of_gpu:
            return self.device
        return "this machine" if len(self.ranks) == 1 else f"this machine, for {len(self.ranks)} ranks"


def device_memories(devices: Sequence[str], answers: Sequence[RankMemory]) -> tuple[DeviceMemory, ...]:
    """`answers`: what the ranks said of their memory, in their order. Ranks of equal places share one DeviceMemory."""
    places: dict[str, list[RankMemory]] = {}
    for answer in answers:
        places.setdefault(answer.place, []).append(answer)
    return tuple(
        DeviceMemory(
            devices[found[0].rank],
            tuple(answer.rank for answer in found),
            # What a process has in reserve serves itself alone, but each of them is about to take more than that.
            None if None in (frees := [f.free_bytes for f in found]) else min(frees) + sum(f.cached_bytes for f in found),
            sum(answer.held_bytes for answer in found),
            found[0].total_bytes,
        )
        for found in places.values()
    )


class MemoryCheck:
    """For one model on its ranks. `device_count`: devices that this machine has.

    `spans`: the blocks of each stage. They may be set anew once blocks are measured. `last`: what was asked last, for an
    error that comes later.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        degrees: Degrees,
        spans: tuple[Span, ...],
        dtype: str,
        devices: tuple[str, ...],
        device_count: int,
    ):
        self.checkpoint, self.degrees, self.spans, self.dtype = checkpoint, degrees, spans, dtype
        self.sizes = model_sizes(checkpoint, dtype, devices[0])
        self.devices, self.device_count = devices, device_count
        self.last: tuple[tuple[Request, ...], tuple[DeviceMemory, ...]] | None = None
        self._warned: tuple[Request, ...] | None = None

    def memory(self, requests: tuple[Request, ...]) -> list[MemoryNeed]:
        """What each rank needs with these requests, in the order of ranks."""
        ranks = range(self.degrees.world)
        return [memory_of(self.sizes, self.degrees, self.spans, rank, requests) for rank in ranks]

    def missing(self, requests: tuple[Request, ...], room: DeviceMemory, loaded: bool) -> int:
        """Bytes that a GPU lacks for its ranks by the whole estimate; 0 where it lacks none, or its free bytes are unknown.

        `loaded`: the model is in place, and the requests come beside it. Otherwise it takes the place of what ranks hold.
        """
        if room.free is None:
            return 0
        needed = self.memory(requests)
        own = [needed[rank] for rank in room.ranks]
        size = sum(one.run if loaded else one.total for one in own)
        return max(0, math.ceil(size / USABLE_MEMORY) - room.free - (0 if loaded else room.held))

    def check_weights(self, found: Sequence[DeviceMemory]) -> None:
        """Before loading; the model takes the place of what ranks hold. ValueError if its weights have no room."""
        self.last = (), tuple(found)
        needed = self.memory(())
        for room in found:
            size = sum(needed[rank].weights for rank in room.ranks)
            if room.free is not None and size > room.free + room.held:
                raise ValueError(
                    f"model_name: the weights of {self.checkpoint.path.name} take {_size(size)} on {room.name}, where "
                    f"{_size(room.free + room.held)}{_place(room)} is free with {self.degrees} and weight_dtype "
                    f"{self.dtype}. "
                    f"{self._instead((), _usable(found))}"
                )

    def check(self, requests: tuple[Request, ...], found: tuple[DeviceMemory, ...]) -> None:
        """Before a run, once the model is loaded. ValueError if the run cannot fit. One warning if it probably does not."""
        self.last = requests, found
        needed = self.memory(requests)
        for room in found:
            if room.free is None:
                continue
            own = [needed[rank] for rank in room.ranks]
            certain, likely = sum(one.certain for one in own), sum(one.run for one in own)
            if certain > room.free:
                raise ValueError(f"latent_image: {self._said(own, room)} {self._instead(requests, _usable(found))}")
            if likely > USABLE_MEMORY * room.free and requests != self._warned:
                self._warned = requests
                log.warning("Parallel DiT: %s %s", self._said(own, room), self._instead(requests, _usable(found)))

    def advice(self) -> str:
        """For a run that ran out of memory although it was let through: its estimate, and what takes a quarter less.

        Empty if nothing was asked yet.
        """
        if self.last is None:
            return ""
        requests, found = self.last
        needed = self.memory(requests)
        each = "; ".join(
            f"{room.device} {self._parts([needed[rank] for rank in room.ranks], loaded=True)}"
            + ("" if room.free is None else f", {_size(room.free + room.held)} was there for it")
            for room in found
        )
        less = [(room, TARGET_SHARE * sum(needed[rank].total for rank in room.ranks)) for room in found]
        return f"The run was expected to take: {each}. {self._instead(requests, less)}"

    def _said(self, own: Sequence[MemoryNeed], room: DeviceMemory) -> str:
        size = sum(one.run for one in own)
        weights = sum(one.weights for one in own)
        return (
            f"this run needs about {_size(size)} more on {room.name} ({self._parts(own)}), where {_size(room.free)}"
            f"{_place(room)} is free beside {_size(weights)} of weights."
        )

    def _parts(self, own: Sequence[MemoryNeed], loaded: bool = False) -> str:
        """Sizes in words. `loaded`: with what is there from loading on."""
        sizes = {
            "of weights": sum(one.weights for one in own) if loaded else 0,
            "for keys and values": sum(one.buffers + one.arriving for one in own),
            "to compute": sum(one.activations + one.staging for one in own),
            "for NCCL": sum(one.communicators for one in own) if loaded else 0,
            "for the GPU's libraries": sum(one.workspaces for one in own),
        }
        return ", ".join(f"{_size(size)} {what}" for what, size in sizes.items() if size)

    def _instead(self, requests: tuple[Request, ...], limits: Sequence[tuple[DeviceMemory, float]]) -> str:
        """What would fit, in words. `limits`: bytes that the ranks of each room may have."""
        shares = tuple(limit / len(room.ranks) for room, limit in limits for _ in room.ranks)
        capacity = Capacity(shares, together=len(limits) == 1 and not limits[0][0].of_gpu)
        ways = changes(
            self.checkpoint,
            self.dtype,
            self.devices[0],
            self.sizes,
            self.degrees,
            self.spans,
            requests,
            capacity,
            self.device_count,
        )
        if not ways:
            return "No single change makes it fit: use more devices, or larger ones."
        return f"It would fit with {', '.join(ways[:-1])}{' or ' * (len(ways) > 1)}{ways[-1]}."


def _usable(found: Sequence[DeviceMemory]) -> list[tuple[DeviceMemory, float]]:
    return [(room, USABLE_MEMORY * (room.free + room.held)) for room in found if room.free is not None]


def devices_for(used: tuple[str, ...]) -> int:
    """How many devices other degrees could use: all GPUs of this machine where all ranks are on some, else those in use."""
    local = all(device.startswith("cuda") for device in used)
    return max(len(used), torch.cuda.device_count() if local else 0)


def _place(room: DeviceMemory) -> str:
    return "" if room.total is None else f" of {_size(room.total)}"


def _size(size: float) -> str:
    """1.2 GB, or 34 MB."""
    return f"{size / 1e9:.1f} GB" if size >= 0.95e9 else f"{size / 1e6:.3g} MB"
