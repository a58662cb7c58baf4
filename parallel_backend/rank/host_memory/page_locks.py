"""Page-locks a model's blocks in host memory for the rank's device."""

import logging
from collections.abc import Callable

import torch

from parallel_backend.core.device_copies import page_locked
from parallel_backend.core.pinned import pin

log = logging.getLogger(__name__)

RESERVE = 1 << 28
"""Bytes that blocks leave for smaller copies (prompts, outputs, transfers) once the driver has refused a block."""


class PageLocks:
    """Page-locks blocks until the driver refuses one, then stops.

    The driver does not report its limit. Under WSL 2 it is 0.5 to 1 GiB for all blocks and copies together. Blocks that are
    not page-locked are copied more slowly, and the host may wait meanwhile. To be used only by the computing thread.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._locked: dict[int, tuple[int, Callable[[], None]]] = {}  # address -> bytes, function that unlocks
        self._refused = not page_locked(device)

    def add(self, memory: torch.Tensor) -> None:
        """Page-lock a block [n] uint8 if possible. It must stay at its address until `close`."""
        if self._refused or not memory.nbytes or memory.data_ptr() in self._locked:
            return
        unlock = pin(memory, self._device)
        if unlock is None:
            self._refused = True
            self._leave_reserve()
        else:
            self._locked[memory.data_ptr()] = memory.nbytes, unlock

    def close(self) -> None:
        """Unlock all blocks. Waits for the device."""
        while self._locked:
            self._unlock_newest()
        self._refused = not page_locked(self._device)

    def _leave_reserve(self) -> None:
        left = 0
        while self._locked and left < RESERVE:
            left += self._unlock_newest()
        log.warning(
            "%.2f GB of the model's blocks are page-locked, the rest is copied more slowly: the driver gives no more",
            sum(nbytes for nbytes, _ in self._locked.values()) / 1e9,
        )

    def _unlock_newest(self) -> int:
        """Unlock the newest block. Returns its bytes."""
        _, (nbytes, unlock) = self._locked.popitem()
        unlock()
        return nbytes
