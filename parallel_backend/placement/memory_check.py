"""Checks whether a model, or a run of it, fits its ranks' devices, before anything is allocated.

The bytes of weights, of keys and values, and of the hidden states of every block are certainly needed: a run without room
for them is refused, and the error names the widgets that help. The estimate of everything may be wrong by half: if it
exceeds the memory, the run only gets a warning.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span

from .device_memory import DeviceMemory
from .memory_advice import Capacity, changes, fits
from .memory_model import USABLE_MEMORY, WEIGHTS_SHARE, MemoryNeed, Request, memory_by_rank
from .model_sizes import RankWeights, model_sizes, weights_by_rank
from .residency import ALL, AUTO, GB, share_out, shared_bytes

log = logging.getLogger(__name__)

SHARED = hasattr(os, "memfd_create")
"""Whether CPU ranks with the same weights share one copy of them (rank/host_memory/arena.py)."""
TARGET_SHARE = 0.75
"""After a run has run out of memory, the advice is for changes that need this fraction of the run's estimate."""


class MemoryCheck:
    """Checks whether one model and its runs fit in the memory of its ranks' devices.

    `device_count`: devices of this machine. `spans`: the blocks of each stage, which may be set again after blocks are
    measured. `last`: requests and memories of the last check, for advice after a later error.
    """

    def __init__(self, checkpoint: Checkpoint, setup: Setup, spans: tuple[Span, ...], device_count: int):
        self.checkpoint, self.setup, self.degrees, self.spans = checkpoint, setup, setup.degrees, spans
        self.sizes = replace(model_sizes(checkpoint, setup.dtype, setup.devices[0]), transfer_dtype=setup.transfer_dtype)
        self.device_count, self.offload = device_count, setup.offload
        self.last: tuple[tuple[Request, ...], tuple[DeviceMemory, ...]] | None = None
        self._warned: tuple[Request, ...] | None = None

    def memory(self, requests: tuple[Request, ...]) -> list[MemoryNeed]:
        """Return the memory that each rank needs for these requests."""
        return memory_by_rank(self.sizes, self.degrees, self.spans, requests)

    def learn(self, requests: tuple[Request, ...], taken: Sequence[int]) -> None:
        """Correct later estimates by a measurement. `taken`: by rank, bytes that micro-steps of these requests allocated
        temporarily."""
        needs = memory_by_rank(replace(self.sizes, measured=1.0), self.degrees, self.spans, requests)
        shares = [nbytes / need.activations for nbytes, need in zip(taken, needs, strict=True) if need.activations]
        self.sizes = replace(self.sizes, measured=max(shares, default=1.0))

    def weights(self) -> list[RankWeights]:
        """Return weights of each rank."""
        return weights_by_rank(self.sizes, self.degrees, self.spans)

    def streams(self, memory: DeviceMemory) -> bool:
        """Whether weights that do not fit in this memory may be streamed from host memory."""
        return self.offload.streams and memory.streams

    def missing(self, requests: tuple[Request, ...], memory: DeviceMemory, resident: Sequence[int] | None) -> int:
        """Bytes that a device lacks for all weights of its ranks and the whole estimate, with `offload`'s bytes left free.

        0 if it lacks none, or if its free bytes are unknown. `resident`: bytes of weights that each rank has on its device
        now. None: the model is not loaded, and takes the place of the ranks' present weights.
        """
        if memory.free is None:
            return 0
        needs, free = self.memory(requests), memory.free - self.offload.leave_free
        run = sum(needs[rank].run for rank in memory.ranks)
        if resident is None:
            size = run + self._together(memory, {rank: needs[rank].weights for rank in memory.ranks})
            return max(0, math.ceil(size / USABLE_MEMORY) - free - memory.held)
        away = sum(max(0, needs[rank].weights - resident[rank]) for rank in memory.ranks)
        return max(0, math.ceil((away + run) / USABLE_MEMORY) - free)

    def _together(self, memory: DeviceMemory, sizes: Mapping[int, int]) -> int:
        """Return the bytes that weights of these `sizes`, by rank, take in `memory`."""
        shared = not memory.of_gpu and not memory.host and SHARED
        return shared_bytes(self.degrees, sizes) if shared else sum(sizes.values())

    def check_weights(self, memories: Sequence[DeviceMemory]) -> None:
        """Check, before loading, whether the weights fit if they replace those on the ranks. Raises ValueError if they
        do not fit even with all permitted blocks streamed."""
        self.last = (), tuple(memories)
        weights = self.weights()
        for memory in memories:
            streams = self.streams(memory)
            sizes = {rank: weights[rank].least if streams else weights[rank].total for rank in memory.ranks}
            size = self._together(memory, sizes)
            if memory.free is not None and size > memory.free + memory.held:
                name = self.checkpoint.path.name
                lack = f"the weights of {name} take {_size(size)} on {memory.name}"
                if streams:
                    lack = f"of the weights of {name} at least {_size(size)} have to be on {memory.name}"
                free = f"{_size(memory.free + memory.held)}{_of_total(memory)} is free"
                raise ValueError(
                    f"model_name: {lack}, where {free} with {self.degrees} and weight_dtype {self.setup.dtype}. "
                    f"{self._instead((), _usable(memories))}"
                )

    def placed(
        self,
        requests: tuple[Request, ...],
        memories: Sequence[DeviceMemory],
        resident: Sequence[int] | None = None,
        most: Mapping[int, int] = MappingProxyType({}),
    ) -> tuple[int, ...]:
        """For each rank, bytes of its device that its weights may take beside these requests. ALL: all weights may stay
        there.

        `resident`: see `missing`; resident weights move only if the whole estimate requires it. Limits go down to
        RankWeights.least. Ranks with the same weights get the same limit, because all wait for the slowest. `most`: by rank,
        limits that hold even if more memory is free.
        """
        weights, needs = self.weights(), self.memory(requests)
        limits = [ALL] * self.degrees.world
        for memory in memories:
            if memory.free is None or not self.streams(memory):
                continue
            sharing = [weights[rank] for rank in memory.ranks]
            run = sum(needs[rank].run for rank in memory.ranks)
            free = memory.free - self.offload.leave_free
            budget = int((USABLE_MEMORY if requests else WEIGHTS_SHARE) * (free + memory.held)) - run
            if resident is not None:
                now = sum(resident[rank] for rank in memory.ranks)
                budget = int(USABLE_MEMORY * (free + now)) - run
                # The run alone fits: weights do not move to win back the slack that USABLE_MEMORY leaves beside them.
                if budget < now <= free + now - run / USABLE_MEMORY:
                    budget = now
            for rank, one, size in zip(memory.ranks, sharing, share_out(sharing, budget), strict=True):
                size = min(size, max(one.least, most.get(rank, size)))
                limits[rank] = ALL if size == one.total else size
        return tuple(min(limits[other] for other in self.degrees.same_weights(rank)) for rank in range(len(limits)))

    def check(
        self, requests: tuple[Request, ...], memories: tuple[DeviceMemory, ...], resident: Sequence[int] | None = None
    ) -> None:
        """Check a run of a loaded model. Raises ValueError if the run cannot fit. Logs one warning if it probably does not.
        `resident`: bytes of weights that each rank has on its device. They can leave the device if they are streamed."""
        self.last = requests, memories
        needs, weights = self.memory(requests), self.weights()
        for memory in memories:
            if memory.free is None:
                continue
            sharing = [needs[rank] for rank in memory.ranks]
            free = memory.free
            if resident is not None and self.streams(memory):
                free += sum(max(0, resident[rank] - weights[rank].least) for rank in memory.ranks)
            certain, likely = sum(need.certain for need in sharing), sum(need.run for need in sharing)
            if certain <= free and (likely <= USABLE_MEMORY * free or requests == self._warned):
                continue
            text = f"{self._shortage(sharing, memory, free)} {self._instead(requests, _usable(memories))}"
            if certain > free:
                raise ValueError(f"latent_image: {text}")
            self._warned = requests
            log.warning("Parallel DiT: %s", text)

    def said_of_streaming(self, limits: Sequence[int]) -> str:
        """Return the streamed bytes under these limits (see `placed`), as text. Empty if nothing is streamed."""
        streamed = [
            f"{one.streamed(limit) / 1e9:.1f} of {one.total / 1e9:.1f} GB on rank {rank}"
            for rank, (one, limit) in enumerate(zip(self.weights(), limits, strict=True))
            if one.streamed(limit)
        ]
        return f"weights streamed from host memory: {', '.join(streamed)}" if streamed else ""

    def is_short(self) -> bool:
        """Whether the last run was expected to take more than half of some device's memory, so that it may have run out."""
        if self.last is None:
            return False
        requests, memories = self.last
        needs = self.memory(requests)
        return any(
            memory.free is None or 2 * sum(needs[rank].total for rank in memory.ranks) > memory.free + memory.held
            for memory in memories
        )

    def advice(self) -> str:
        """Advice for a run that ran out of memory although its check passed: its estimate, and changes that need a quarter
        less. Empty before the first check."""
        if self.last is None:
            return ""
        requests, memories = self.last
        needs = self.memory(requests)
        each = "; ".join(
            f"{memory.device} {self._parts([needs[rank] for rank in memory.ranks], loaded=True)}"
            + ("" if memory.free is None else f", {_size(memory.free + memory.held)} was there for it")
            for memory in memories
        )
        less = [(memory, TARGET_SHARE * sum(needs[rank].total for rank in memory.ranks)) for memory in memories]
        instead = self._instead(requests, less)
        if memories and all(map(self.streams, memories)):
            lack = (1 - TARGET_SHARE) * max(need.total for need in needs)
            instead += (
                f" Or set offload to {math.ceil((self.offload.leave_free + lack) / GB)}, which leaves that many GB free."
            )
        return f"The run was expected to take: {each}. {instead}"

    def _shortage(self, needs: Sequence[MemoryNeed], memory: DeviceMemory, free: int) -> str:
        """Text about the memory that a run lacks. `free`: includes bytes that streamed weights can free; may be negative."""
        weights = sum(need.weights for need in needs)
        free_text = (
            "is free with weights streamed" if self.streams(memory) else f"is free beside {_size(weights)} of weights"
        )
        return (
            f"this run needs about {_size(sum(need.run for need in needs))} more on {memory.name} ({self._parts(needs)}), "
            f"where {_size(max(0, free))}{_of_total(memory)} {free_text}."
        )

    def _parts(self, needs: Sequence[MemoryNeed], loaded: bool = False) -> str:
        """Return sizes as text. `loaded`: include the weights."""
        sizes = {
            "of weights": sum(need.weights for need in needs) if loaded else 0,
            "for keys and values": sum(need.buffers + need.arriving for need in needs),
            "to compute": sum(need.activations for need in needs),
        }
        return ", ".join(f"{_size(size)} {purpose}" for purpose, size in sizes.items() if size)

    def _instead(self, requests: tuple[Request, ...], limits: Sequence[tuple[DeviceMemory, float]]) -> str:
        """Return the changes that would fit, as a sentence. `limits`: bytes that the ranks of each memory may take."""
        shares = tuple(limit / len(memory.ranks) for memory, limit in limits for _ in memory.ranks)
        memories = [memory for memory, _ in limits]
        capacity = Capacity(shares, len(memories) == 1 and not memories[0].of_gpu, all(map(self.streams, memories)))
        ways = changes(self.checkpoint, self.setup, self.sizes, self.spans, requests, capacity, self.device_count)
        if not capacity.streams and all(memory.streams for memory in memories):
            streaming = replace(capacity, streams=True)
            if fits(self.sizes, self.degrees, self.spans, requests, streaming):
                ways.insert(0, f"offload {AUTO}")
        if not ways:
            return "No single change makes it fit. Use more devices, or larger ones."
        return f"It would fit with {', '.join(ways[:-1])}{' or ' * (len(ways) > 1)}{ways[-1]}."


def _usable(memories: Sequence[DeviceMemory]) -> list[tuple[DeviceMemory, float]]:
    return [(memory, USABLE_MEMORY * (memory.free + memory.held)) for memory in memories if memory.free is not None]


def devices_for(used: tuple[str, ...]) -> int:
    """Number of devices that other degrees could use: all local GPUs if all ranks are on GPUs, otherwise those in use."""
    local = all(device.startswith("cuda") for device in used)
    return max(len(used), torch.cuda.device_count() if local else 0)


def _of_total(memory: DeviceMemory) -> str:
    return "" if memory.total is None else f" of {_size(memory.total)}"


def _size(size: float) -> str:
    """Return the size as text: 1.2 GB, or 34 MB."""
    return f"{size / 1e9:.1f} GB" if size >= 0.95e9 else f"{size / 1e6:.3g} MB"
