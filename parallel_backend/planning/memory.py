"""The memory that a mode takes of devices and host, and the weights that it streams because devices are too small. Each rank
has its own device."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Memory that the rank needs with all of its weights on the device."""
    weights: RankWeights
    resident: int
    """Bytes of the device that the weights may take."""
    copies: float = 0.0
    """Bytes a second from host memory to the device while all ranks copy. 0: weights cannot come from there."""

    @property
    def on_device(self) -> int:
        return self.need.total - self.weights.total + self.weights.on_device(self.resident)

    @property
    def streamed(self) -> int:
        """Bytes of weights in host memory, which each micro-step copies to the device."""
        return self.weights.streamed(self.resident)

    def copy_seconds(self) -> float:
        """Return the seconds to copy the streamed blocks to the device."""
        return self.streamed / self.copies if self.streamed else 0.0


def holdings(
    machine: Machine,
    devices: Sequence[int],
    needs: Sequence[MemoryNeed],
    weights: Sequence[RankWeights],
    offload: Offload,
) -> tuple[Holding, ...]:
    """Return each rank's memory. `devices`: the number of each rank's device in the machine."""
    held = []
    for number, need, one in zip(devices, needs, weights, strict=True):
        device, resident = machine.devices[number], one.total
        if offload.streams and device.copies and device.memory is not None:
            room = int(USABLE_MEMORY * (device.memory - offload.leave_free)) - (need.total - need.weights)
            (resident,) = share_out([one], room)
        held.append(Holding(need, one, resident, device.copies))
    return tuple(held)


def bytes_on_host(machine: Machine, mode: Mode, held: Sequence[Holding]) -> int:
    """Return the bytes of the host's memory: of streamed weights, and of ranks that compute there."""
    weights, other_bytes = {}, 0
    for rank, (device, holding) in enumerate(zip(mode.devices, held, strict=True)):
        on_host = machine.devices[device].memory is None
        weights[rank] = holding.weights.total if on_host else holding.streamed
        other_bytes += holding.need.total - holding.weights.total if on_host else 0
    return shared_bytes(mode.degrees, weights) + other_bytes


def lacking(machine: Machine, mode: Mode, held: Sequence[Holding]) -> str:
    """Return why ranks with this memory do not fit. Empty if they do."""
    lacks, on_host, free = "", bytes_on_host(machine, mode, held), machine.host_free
    if free is not None and on_host > USABLE_MEMORY * free:
        lacks = f"the ranks need {gigabytes(on_host)} of host memory together, {gigabytes(free)} is free"
    for number, holding in zip(mode.devices, held, strict=True):
        device, size = machine.devices[number], holding.on_device
        if device.memory is not None and size > USABLE_MEMORY * device.memory:
            lacks = f"needs {gigabytes(size)} on {device.name}, which has {gigabytes(device.memory)} free"
    return lacks


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
