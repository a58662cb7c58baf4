"""What one device did: bytes that were allocated, kernels, bytes that they moved, and waits of the host."""

from collections import Counter
from dataclasses import dataclass, field

ROUND = 512
"""Bytes to whose multiple torch's CUDA allocator rounds an allocation (CUDACachingAllocator, kMinBlockSize)."""


@dataclass
class Account:
    """One device's. `begin` starts it anew; what is allocated by then stays allocated."""

    allocated: int = 0
    """Bytes in tensors now."""
    peak: int = 0
    """The most bytes since `begin`."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Operations that are no views, by name. Each counts once, however many kernels a real device would launch for it."""
    products: int = 0
    """Of `kernels`, matrix products and attention."""
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes that all other operations read and wrote, by name. A tensor that repeats values counts with what it repeats."""
    copied: Counter[str] = field(default_factory=Counter)
    """Bytes of copies "to the host" and "to the device"."""
    stops: int = 0
    """Waits of the host for this device."""
    sent: Counter[int] = field(default_factory=Counter)
    """Payload bytes sent to each other rank."""

    def begin(self) -> None:
        self.peak, self.products, self.stops = self.allocated, 0, 0
        for counter in (self.kernels, self.moved, self.copied, self.sent):
            counter.clear()

    def take(self, nbytes: int) -> int:
        """Allocates `nbytes`, and returns the bytes that are to be given back."""
        size = -(-nbytes // ROUND) * ROUND
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        return size

    def give(self, size: int) -> None:
        self.allocated -= size
