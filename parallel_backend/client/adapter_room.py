"""Room on the ranks' devices for additions to weights (LoRA), made before they are sent.

Other models and programs free memory first, then the model's own blocks are streamed. The next
run without the additions brings the weights back (MemoryGuard).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel_backend.placement.device_memory import DeviceMemory
from parallel_backend.placement.memory_model import USABLE_MEMORY
from parallel_backend.wire.loading import Adapt

from .resident_weights import ResidentWeights

AT_ONCE = 1 << 28
"""At least this many bytes are requested: a LoRA has hundreds of parts, and each move of weights waits for copies."""
WORKING = 4
"""Bytes of the two float32 values that exist while a value of an addition is scaled."""


@dataclass
class _Room:
    """`free`: bytes of a device that additions may take; `taken`: by those that were sent. `asks`: more may become free."""

    memory: DeviceMemory
    free: int
    taken: int = 0
    asks: bool = True


class AdapterRoom:
    """For one model's additions, from the first that is sent to the last."""

    def __init__(
        self,
        read: Callable[[], Sequence[DeviceMemory]],
        make_room: Callable[[str, int], int],
        resident: ResidentWeights,
        streams: Callable[[DeviceMemory], bool],
        value_bytes: int,
    ):
        """`read()`: the devices' memory, asked for once the ranks have dropped earlier additions. `make_room`: see
        memory_guard.MakeRoom. `streams`: whether weights of these ranks may be streamed. `value_bytes`: of a value in the
        compute dtype."""
        self._read, self._make_room, self._resident = read, make_room, resident
        self._streams, self._value_bytes = streams, value_bytes
        self._rooms: dict[int, _Room] = {}

    def take(self, rank: int, part: Adapt) -> None:
        """`part` is about to be sent to the rank: make room for it there. Later messages find the room.

        Under tensor parallelism the whole part counts, although a rank keeps only a shard. If nothing more can give way, the
        part is sent anyway, because only the device knows exactly what fits.
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
        """(bytes that stay, temporary bytes) on a device."""
        values = part.up.numel() + (0 if part.down is None else part.down.numel())
        passing = 2 * WORKING * part.up.numel()
        if part.up.ndim == 1:  # a parameter of its own: as loaded, as changed, and the sum of changes in float32
            return values * (2 * self._value_bytes + WORKING), passing
        weighed = part.up.numel() if part.group else 0  # times a strength that changes
        return (values + weighed) * self._value_bytes, passing

    def _free(self, memory: DeviceMemory, nbytes: int) -> int:
        """Free `nbytes` of the device before the ranks handle later messages. Returns the bytes that become free."""
        freed = self._make_room(memory.device, nbytes)
        if freed >= nbytes or not self._streams(memory):
            return freed
        return freed + self._resident.give_way(memory.ranks, nbytes - freed, whole=False, working=True)
