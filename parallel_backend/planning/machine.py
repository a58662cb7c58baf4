"""A machine: its devices and the links between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_backend.core.devices import device_kind
from parallel_backend.placement.gpu_overheads import COPY_RATE
from parallel_backend.placement.links import Links, links_of
from parallel_backend.wire.diagnosis import DeviceMemoryReport
from parallel_backend.wire.messages import LinksProbed


@dataclass(frozen=True)
class Device:
    name: str
    """The name in the `devices` widget."""
    kind: str
    """The hardware's name, for a report."""
    memory: int | None = None
    """Bytes that a run may take. None: the device computes in the host's memory."""
    total: int | None = None
    """All bytes of the device's memory."""
    copies: float = 0.0
    """Bytes a second from host memory to the device. 0: the device computes in the host's memory."""


@dataclass(frozen=True)
class Machine:
    devices: tuple[Device, ...]
    """The devices in the order of the ranks."""
    links: Links
    host_free: int | None = None
    """Free bytes of the memory that all CPU ranks share. None: unknown."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @property
    def on_cpus(self) -> bool:
        return not any(device_kind(name) == "cuda" for name in self.names)


def machine_of(names: Sequence[str], probes: Sequence[LinksProbed], memories: Sequence[DeviceMemoryReport]) -> Machine:
    """Return the machine as its ranks report it, in their order, with the memory that is free now."""
    devices = []
    for name, probe, memory in zip(names, probes, memories, strict=True):
        source = probe if probe.total_bytes or not memory.host else memory
        copies = (memory.copy_rate or COPY_RATE) if memory.host else 0.0
        devices.append(Device(name, probe.name, source.free_bytes, source.total_bytes, copies))
    return Machine(tuple(devices), links_of(probes))
