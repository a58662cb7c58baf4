"""Whether a model, or a run of it, fits its ranks' devices. Asked before anything is allocated; the answer names the widgets
that would change it.

Weights, keys and values, and the hidden states that every block has are certain: a run that has no room for them is refused.
The whole estimate may be off by half: where only that does not fit, a warning is logged.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span

from .device_memory import DeviceMemory
from .memory_advice import Capacity, changes, fits
from .memory_model import USABLE_MEMORY, WEIGHTS_SHARE, MemoryNeed, Request, memory_of
from .model_sizes import RankWeights, model_sizes, rank_weights
from .residency import ALL, ALLOWED, AUTO, GB, Offload, share_out, shared_bytes

log = logging.getLogger(__name__)

SHARED = hasattr(os, "memfd_create")
"""Ranks on CPUs that have the same weights share one copy of them (rank/host_memory/arena.py)."""
TARGET_SHARE = 0.75
"""A run that ran out of memory is told what would take this part of its estimate."""


class MemoryCheck:
    """For one model on its ranks. `device_count`: devices that this machine has. `offload`: what the user allows.

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
        offload: Offload = ALLOWED,
        transfer_dtype: str = "full",
    ):
        self.checkpoint, self.degrees, self.spans, self.dtype = checkpoint, degrees, spans, dtype
        self.sizes = replace(model_sizes(checkpoint, dtype, devices[0]), transfer_dtype=transfer_dtype)
        self.devices, self.device_count, self.offload = devices, device_count, offload
        self.last: tuple[tuple[Request, ...], tuple[DeviceMemory, ...]] | None = None
        self._warned: tuple[Request, ...] | None = None

    def memory(self, requests: tuple[Request, ...]) -> list[MemoryNeed]:
        """What each rank needs with these requests, in the order of ranks."""
        ranks = range(self.degrees.world)
        return [memory_of(self.sizes, self.degrees, self.spans, rank, requests) for rank in ranks]

    def weights(self) -> list[RankWeights]:
        """Of each rank, in their order."""
        stages = [self.degrees.coordinate(rank).pipe for rank in range(self.degrees.world)]
        return [rank_weights(self.sizes, self.degrees.tensor, self.spans[stage]) for stage in stages]

    def streams(self, memory: DeviceMemory) -> bool:
        """Weights that do not fit there may be in host memory."""
        return self.offload.streams and memory.streams

    def missing(self, requests: tuple[Request, ...], memory: DeviceMemory, resident: Sequence[int] | None) -> int:
        """Bytes that a device lacks for its ranks by the whole estimate, with all of their weights and what is to stay free;
        0 where it lacks none, or its free bytes are unknown.

        `resident`: bytes of weights that each rank has on its device now, the requests come beside them. None: the model is
        not loaded, and takes the place of what ranks hold.
        """
        if memory.free is None:
            return 0
        needed, there = self.memory(requests), memory.free - self.offload.leave_free
        if resident is None:
            other_bytes = sum(needed[rank].total - needed[rank].weights for rank in memory.ranks)
            size = other_bytes + self._together(memory, {rank: needed[rank].weights for rank in memory.ranks})
            return max(0, math.ceil(size / USABLE_MEMORY) - there - memory.held)
        away = sum(max(0, needed[rank].weights - resident[rank]) for rank in memory.ranks)
        size = away + sum(needed[rank].run for rank in memory.ranks)
        return max(0, math.ceil(size / USABLE_MEMORY) - there)

    def _together(self, memory: DeviceMemory, sizes: Mapping[int, int]) -> int:
        """Bytes that weights of these `sizes`, by rank, take in `memory`."""
        shared = not memory.of_gpu and not memory.host and SHARED
        return shared_bytes(self.degrees, sizes) if shared else sum(sizes.values())

    def check_weights(self, found: Sequence[DeviceMemory]) -> None:
        """Before loading; the model takes the place of what ranks hold. ValueError if its weights have no room, also with
        all streamed that can be.
        """
        self.last = (), tuple(found)
        weights = self.weights()
        for memory in found:
            streams = self.streams(memory)
            sizes = {rank: weights[rank].least if streams else weights[rank].total for rank in memory.ranks}
            size = self._together(memory, sizes)
            if memory.free is not None and size > memory.free + memory.held:
                name = self.checkpoint.path.name
                what = f"the weights of {name} take {_size(size)} on {memory.name}"
                if streams:
                    what = f"of the weights of {name} at least {_size(size)} have to be on {memory.name}"
                there = f"{_size(memory.free + memory.held)}{_place(memory)} is free"
                raise ValueError(
                    f"model_name: {what}, where {there} with {self.degrees} and weight_dtype {self.dtype}. "
                    f"{self._instead((), _usable(found))}"
                )

    def placed(
        self, requests: tuple[Request, ...], found: Sequence[DeviceMemory], resident: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """By rank, bytes of its device that its weights may have beside these requests; ALL where that is all of them.

        `resident`: see `missing`; what is there moves only for a reason. It goes by the whole estimate, and down to what the
        ranks cannot compute without. Ranks with the same weights get the same: they go at the pace of the slowest.
        """
        weights, needed = self.weights(), self.memory(requests)
        limits = [ALL] * self.degrees.world
        for memory in found:
            if not self.streams(memory):
                continue
            own = [weights[rank] for rank in memory.ranks]
            run = sum(needed[rank].total - needed[rank].weights for rank in memory.ranks)
            there = memory.free - self.offload.leave_free
            budget = int((USABLE_MEMORY if requests else WEIGHTS_SHARE) * (there + memory.held)) - run
            if resident is not None:
                now, run = sum(resident[rank] for rank in memory.ranks), sum(needed[rank].run for rank in memory.ranks)
                budget = int(USABLE_MEMORY * (there + now)) - run
                if budget < now <= there + now - run / USABLE_MEMORY:  # the slack that it was given is no reason
                    budget = now
            for rank, one, size in zip(memory.ranks, own, share_out(own, budget), strict=True):
                limits[rank] = ALL if size == one.total else size
        return tuple(min(limits[other] for other in self.degrees.same_weights(rank)) for rank in range(len(limits)))

    def check(
        self, requests: tuple[Request, ...], found: tuple[DeviceMemory, ...], resident: Sequence[int] | None = None
    ) -> None:
        """Before a run, once the model is loaded. ValueError if the run cannot fit. One warning if it probably does not.

        `resident`: bytes of weights that each rank has on its device, which can give way where they are streamed.
        """
        self.last = requests, found
        needed, weights = self.memory(requests), self.weights()
        for memory in found:
            if memory.free is None:
                continue
            own = [needed[rank] for rank in memory.ranks]
            free = memory.free
            if resident is not None and self.streams(memory):
                free += sum(max(0, resident[rank] - weights[rank].least) for rank in memory.ranks)
            certain, likely = sum(one.certain for one in own), sum(one.run for one in own)
            if certain > free:
                raise ValueError(f"latent_image: {self._said(own, memory, free)} {self._instead(requests, _usable(found))}")
            if likely > USABLE_MEMORY * free and requests != self._warned:
                self._warned = requests
                log.warning("Parallel DiT: %s %s", self._said(own, memory, free), self._instead(requests, _usable(found)))

    def said_of_streaming(self, limits: Sequence[int]) -> str:
        """What these limits (see `placed`) mean, in words. Empty if nothing is streamed."""
        weights = self.weights()
        streamed = [
            f"{one.streamed(limit) / 1e9:.1f} of {one.total / 1e9:.1f} GB on rank {rank}"
            for rank, (one, limit) in enumerate(zip(weights, limits, strict=True))
            if one.streamed(limit)
        ]
        return f"weights come from host memory as they are needed: {', '.join(streamed)}" if streamed else ""

    def advice(self) -> str:
        """For a run that ran out of memory although it was let through: its estimate, and what takes a quarter less.

        Empty if nothing was asked yet.
        """
        if self.last is None:
            return ""
        requests, found = self.last
        needed = self.memory(requests)
        each = "; ".join(
            f"{memory.device} {self._parts([needed[rank] for rank in memory.ranks], loaded=True)}"
            + ("" if memory.free is None else f", {_size(memory.free + memory.held)} was there for it")
            for memory in found
        )
        less = [(memory, TARGET_SHARE * sum(needed[rank].total for rank in memory.ranks)) for memory in found]
        instead = self._instead(requests, less)
        if found and all(map(self.streams, found)):
            lack = (1 - TARGET_SHARE) * max(need.total for need in needed)
            instead += (
                f" Or set offload to {math.ceil((self.offload.leave_free + lack) / GB)}, which leaves so many GB free."
            )
        return f"The run was expected to take: {each}. {instead}"

    def _said(self, own: Sequence[MemoryNeed], memory: DeviceMemory, free: int) -> str:
        """`free`: with what weights can give up there, where they are streamed. Below 0 where not even weights fit."""
        size = sum(one.run for one in own)
        weights = sum(one.weights for one in own)
        free_text = (
            "is free with weights streamed" if self.streams(memory) else f"is free beside {_size(weights)} of weights"
        )
        return (
            f"this run needs about {_size(size)} more on {memory.name} ({self._parts(own)}), where {_size(max(0, free))}"
            f"{_place(memory)} {free_text}."
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
        shares = tuple(limit / len(memory.ranks) for memory, limit in limits for _ in memory.ranks)
        memories = [memory for memory, _ in limits]
        capacity = Capacity(shares, len(memories) == 1 and not memories[0].of_gpu, all(map(self.streams, memories)))
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
        if not capacity.streams and all(memory.streams for memory in memories):
            streaming = replace(capacity, streams=True)
            if fits(self.sizes, self.degrees, self.spans, requests, streaming):
                ways.insert(0, f"offload {AUTO}")
        if not ways:
            return "No single change makes it fit: use more devices, or larger ones."
        return f"It would fit with {', '.join(ways[:-1])}{' or ' * (len(ways) > 1)}{ways[-1]}."


def _usable(found: Sequence[DeviceMemory]) -> list[tuple[DeviceMemory, float]]:
    return [(memory, USABLE_MEMORY * (memory.free + memory.held)) for memory in found if memory.free is not None]


def devices_for(used: tuple[str, ...]) -> int:
    """How many devices other degrees could use: all GPUs of this machine where all ranks are on some, else those in use."""
    local = all(device.startswith("cuda") for device in used)
    return max(len(used), torch.cuda.device_count() if local else 0)


def _place(memory: DeviceMemory) -> str:
    return "" if memory.total is None else f" of {_size(memory.total)}"


def _size(size: float) -> str:
    """1.2 GB, or 34 MB."""
    return f"{size / 1e9:.1f} GB" if size >= 0.95e9 else f"{size / 1e6:.3g} MB"
