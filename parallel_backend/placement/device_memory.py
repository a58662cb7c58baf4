"""The memories that ranks share, as the ranks reported them."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_backend.wire.diagnosis import DeviceMemoryReport


@dataclass(frozen=True)
class DeviceMemory:
    """One memory that `ranks` share, on `device`. All figures are bytes.

    `free`: free for these ranks, None if unknown. `held`: taken by their model. `total`: None if unknown. `host`,
    `host_free`: name of the machine whose memory is beside the device's, and its bytes that weights may take; empty and None
    if the device computes in the machine's memory. `copy_rate`: bytes a second from the machine's memory to the device, 0 if
    unknown. `vae`: taken by parts of VAEs, which make room for a model.
    """

    device: str
    ranks: tuple[int, ...]
    free: int | None
    held: int
    total: int | None
    host: str = ""
    host_free: int | None = None
    copy_rate: float = 0.0
    vae: int = 0

    @property
    def of_gpu(self) -> bool:
        return "cuda" in self.device

    @property
    def streams(self) -> bool:
        """Whether weights can be kept in host memory and copied here when they are needed."""
        return bool(self.host) and self.free is not None

    @property
    def name(self) -> str:
        """The memory's name in a message."""
        if self.of_gpu or self.host:
            return self.device
        return "this machine" if len(self.ranks) == 1 else f"this machine, for {len(self.ranks)} ranks"


def device_memories(devices: Sequence[str], reports: Sequence[DeviceMemoryReport]) -> tuple[DeviceMemory, ...]:
    """Return the memories of the ranks' devices. `reports`: by rank. Ranks whose reports have equal places share one
    DeviceMemory."""
    places: dict[str, list[DeviceMemoryReport]] = {}
    for report in reports:
        places.setdefault(report.place, []).append(report)
    return tuple(
        DeviceMemory(
            devices[sharing[0].rank],
            tuple(report.rank for report in sharing),
            _free(sharing),
            sum(report.held_bytes for report in sharing),
            sharing[0].total_bytes,
            sharing[0].host,
            sharing[0].host_free_bytes,
            min(report.copy_rate for report in sharing),
            sum(report.vae_bytes for report in sharing),
        )
        for sharing in places.values()
    )


def _free(sharing: Sequence[DeviceMemoryReport]) -> int | None:
    known = [report.free_bytes for report in sharing if report.free_bytes is not None]
    if len(known) < len(sharing):
        return None
    # An allocator's reserve serves its own process alone. It counts for all, since each process is about to take more.
    return min(known) + sum(report.cached_bytes for report in sharing)
