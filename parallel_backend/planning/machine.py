"""A machine: its devices and the links between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parallel_backend.core.devices import device_kind
from parallel_backend.placement.gpu_overheads import COPY_RATE
from parallel_backend.placement.links import Links, links_of
from parallel_backend.wire.diagnosis import DeviceMemoryReport
from parallel_backend.wire.messages import LinksProbed


@dataclass(frozen=True)
class Device:
    name: str
    """As the `devices` widget has it."""
    kind: str
    """What it is, for a report."""
    memory: int | None = None
    """Bytes that a run may have. None: it computes in the host's memory."""
    total: int | None = None
    """Bytes of its memory altogether."""
    copies: float = 0.0
    """Bytes a second that come there from host memory. 0: it computes in that memory."""


@dataclass(frozen=True)
class Machine:
    devices: tuple[Device, ...]
    """In the order of the ranks."""
    links: Links
    host_free: int | None = None
    """Bytes of memory that all CPU ranks share. None: not known."""
    peers: Mapping[tuple[int, int], bool] = field(default_factory=dict)
    """Pair of CUDA devices -> the first one can reach the second one's memory directly (P2P)."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @property
    def on_cpus(self) -> bool:
        return not any(device_kind(name) == "cuda" for name in self.names)


def machine_of(
    names: Sequence[str], found: Sequence[LinksProbed], memories: Sequence[DeviceMemoryReport], host_free: int | None = None
) -> Machine:
    """The machine as its ranks found it, with the memory that is free now."""
    devices = []
    for name, one, memory in zip(names, found, memories, strict=True):
        free, total = (one.free_bytes, one.total_bytes) if one.total_bytes else (memory.free_bytes, memory.total_bytes)
        apart = (free, total, memory.copy_rate or COPY_RATE) if memory.host else (one.free_bytes, one.total_bytes)
        devices.append(Device(name, one.name, *apart))
    peers = {(one.rank, other): reached for one in found for other, reached in one.peers.items()}
    return Machine(tuple(devices), links_of(found), host_free, peers)
