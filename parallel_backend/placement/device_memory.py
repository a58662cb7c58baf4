"""The memories that ranks share, as the ranks found them."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_backend.wire.diagnosis import DeviceMemoryReport


@dataclass(frozen=True)
class DeviceMemory:
    """One memory that `ranks` share, on `device`; all figures are bytes.

    `free`: free to these ranks, None where unknown. `held`: taken by their model. `total`: None where unknown. `host`,
    `host_free`: the machine whose memory is beside the device's, and what is free there; empty and None where the device's
    memory is the machine's own. `copy_rate`: bytes a second from there to the device, 0 where unknown. `vae`: taken by parts
    of VAEs, which make way.
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
        """Weights can be kept in another memory and brought here when they are needed."""
        return bool(self.host) and self.free is not None

    @property
    def name(self) -> str:
        """How a message calls it."""
        if self.of_gpu or self.host:
            return self.device
        return "this machine" if len(self.ranks) == 1 else f"this machine, for {len(self.ranks)} ranks"


def device_memories(devices: Sequence[str], answers: Sequence[DeviceMemoryReport]) -> tuple[DeviceMemory, ...]:
    """`answers`: what the ranks said of their memory, in their order. Ranks of equal places share one DeviceMemory."""
    places: dict[str, list[DeviceMemoryReport]] = {}
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
            found[0].host,
            found[0].host_free_bytes,
            min(answer.copy_rate for answer in found),
            sum(answer.vae_bytes for answer in found),
        )
        for found in places.values()
    )
