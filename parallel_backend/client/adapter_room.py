"""Makes room on the ranks' devices for additions to weights (LoRA) before they are sent.

First other models and programs free memory, then the model's own blocks are streamed. The next run without the additions
brings the weights back (MemoryGuard).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel_backend.placement.device_memory import DeviceMemory
from parallel_backend.placement.memory_check import MemoryCheck
from parallel_backend.placement.memory_model import USABLE_MEMORY
from parallel_backend.wire.loading import Adapt

from .resident_weights import ResidentWeights

AT_ONCE = 1 << 28
"""At least this many bytes are requested at a time: a LoRA has hundreds of parts, and each move of weights waits for
copies."""
WORKING = 4
"""Bytes of a value in float32. While a value of an addition is scaled, two float32 copies of it exist."""


@dataclass
class _Room:
    """A device's room. `free`: bytes that additions may take. `taken`: bytes of the additions that were sent. `asks`:
    whether more may become free."""

    memory: DeviceMemory
    free: int
    taken: int = 0
    asks: bool = True


class AdapterRoom:
    """Makes room for the additions of one model, from the first part that is sent to the last."""

    def __init__(
        self,
        read: Callable[[], Sequence[DeviceMemory]],
        make_room: Callable[[str, int], int],
        resident: ResidentWeights,
        check: MemoryCheck,
    ):
        """`read()`: returns the devices' memory; called after ranks have dropped earlier additions. `make_room`: see
        memory_guard.MakeRoom."""
        self._read, self._make_room, self._resident, self._check = read, make_room, resident, check
        self._rooms: dict[int, _Room] = {}

    def take(self, rank: int, part: Adapt) -> None:
        """Make room on the rank for `part`, which is about to be sent.

        Under tensor parallelism the whole part counts, although a rank keeps only a shard. If no more memory can be freed,
        the part is sent anyway, because only the device knows exactly what fits.
        """
        if not self._rooms:
            self._rooms = {
                rank: room
                for memory in self._read()
                for room in [_Room(memory, int(USABLE_MEMORY * (memory.free or 0)))]
                for rank in memory.ranks
            }
        room = self._rooms[rank]
        if not room.memory.streams:  # the host's own memory, or unknown
            return
        kept, passing = self._bytes_of(part)
        room.taken += kept
        lacking = room.taken + passing - room.free
        if lacking > 0 and room.asks:
            room.free += self._free(room.memory, max(lacking, AT_ONCE))
            room.asks = room.taken + passing <= room.free

    def _bytes_of(self, part: Adapt) -> tuple[int, int]:
        """Return (bytes that stay, temporary bytes) of an addition on a device."""
        values, value_bytes = part.up.numel() + (0 if part.down is None else part.down.numel()), self._check.sizes.itemsize
        passing = 2 * WORKING * part.up.numel()
        if part.up.ndim == 1:  # a parameter of its own: as loaded, as changed, and the sum of changes in float32
            return values * (2 * value_bytes + WORKING), passing
        weighed = part.up.numel() if part.group else 0  # times a strength that changes
        return (values + weighed) * value_bytes, passing

    def _free(self, memory: DeviceMemory, nbytes: int) -> int:
        """Free `nbytes` of the device before the ranks handle later messages. Returns the bytes that become free."""
        freed = self._make_room(memory.device, nbytes)
        if freed >= nbytes or not self._check.streams(memory):
            return freed
        return freed + self._resident.give_way(memory.ranks, nbytes - freed, whole=False, working=True)
