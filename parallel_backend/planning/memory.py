"""What a mode takes of the devices' memory and of the host's, and what is streamed of weights that devices do not hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.setup import Offload
from parallel_backend.placement.memory_model import USABLE_MEMORY, MemoryNeed
from parallel_backend.placement.model_sizes import RankWeights
from parallel_backend.placement.residency import share_out, shared_bytes

from .machine import Machine
from .modes import Mode


@dataclass(frozen=True)
class Holding:
    """A rank's memory."""

    need: MemoryNeed
    """With all of its weights."""
    weights: RankWeights
    resident: int
    """Bytes of the device that the weights may have."""
    copies: float = 0.0
    """Bytes a second that come to the device from host memory while all ranks copy. 0: none do."""

    @property
    def on_device(self) -> int:
        return self.need.total - self.weights.total + self.weights.on_device(self.resident)

    @property
    def streamed(self) -> int:
        """Bytes of weights in host memory, which each micro-step brings to the device."""
        return self.weights.streamed(self.resident)

    def copy_seconds(self) -> list[float]:
        """Of each block, in their order; 0 for those that stay on the device."""
        seconds = [0.0] * len(self.weights.blocks)
        for index in self.weights.streamed_blocks(self.resident):
            seconds[index] = self.weights.blocks[index] / self.copies
        return seconds


def holdings(
    machine: Machine,
    devices: Sequence[int],
    needs: Sequence[MemoryNeed],
    weights: Sequence[RankWeights],
    offload: Offload,
) -> tuple[Holding, ...]:
    """By rank; `devices`: each one's device, by its number in the machine."""
    found: dict[int, Holding] = {}
    for group in _together(machine, devices):
        device = machine.devices[devices[group[0]]]
        own = [weights[rank] for rank in group]
        resident = [one.total for one in own]
        if offload.streams and device.copies and device.memory is not None:
            other_bytes = sum(needs[rank].total - needs[rank].weights for rank in group)
            resident = share_out(own, int(USABLE_MEMORY * (device.memory - offload.leave_free)) - other_bytes)
        for rank, one, limit in zip(group, own, resident, strict=True):
            found[rank] = Holding(needs[rank], one, limit, device.copies / len(group))
    return tuple(found[rank] for rank in range(len(devices)))


def bytes_on_host(machine: Machine, mode: Mode, held: Sequence[Holding]) -> int:
    """Of the machine's own memory: weights that are streamed, and all of ranks that compute there."""
    there = [machine.devices[device].memory is None for device in mode.devices]
    weights = {rank: one.weights.total if there[rank] else one.streamed for rank, one in enumerate(held)}
    other_bytes = sum(one.need.total - one.weights.total for one, on_cpu in zip(held, there, strict=True) if on_cpu)
    return shared_bytes(mode.degrees, weights) + other_bytes


def lacking(
    held: Mapping[int, int], devices: Sequence[str], free: Sequence[int | None], on_host: int, host_free: int | None
) -> str:
    """Why ranks that need so many bytes do not fit; empty if they do. `free`: bytes on each rank's device, None for one that
    computes in the host's memory. `on_host`: see bytes_on_host."""
    lacks = ""
    if host_free is not None and on_host > USABLE_MEMORY * host_free:
        lacks = f"the ranks need {gigabytes(on_host)} of host memory together, {gigabytes(host_free)} is free"
    for rank in held:
        size = sum(
            held[other] for other in held if other == rank or (devices[other] == devices[rank] and _shared(devices[rank]))
        )
        if free[rank] is not None and size > USABLE_MEMORY * free[rank]:
            lacks = f"needs {gigabytes(size)} on {devices[rank]}, which has {gigabytes(free[rank])} free"
    return lacks


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _together(machine: Machine, devices: Sequence[int]) -> list[list[int]]:
    """The ranks, by the memory that they are in."""
    groups: dict[object, list[int]] = {}
    for rank, device in enumerate(devices):
        name = machine.names[device]
        groups.setdefault(name if _shared(name) else device, []).append(rank)
    return list(groups.values())


def _shared(name: str) -> bool:
    """Devices of this name are one. Those of a cluster are not, and one that a CPU rank stands in for has its own."""
    return device_kind(name) == "cuda" and not on_ray(name)
