"""Segments of memory that the client shares with ranks of the same machine, for tensors too large for a pipe.

The client creates a segment, copies tensors into it, and gives their offsets in a message's header. On Linux a segment is an
anonymous file in memory whose handle is sent over the control socket: no other process can open it, and the size of /dev/shm
does not limit it. It is freed with the last process that has it. On other systems, and to other machines, all tensors are
sent over the connection.
"""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from parallel_backend.core.device_copies import copy_to_host

ALIGNMENT = 64
"""A tensor in a segment starts at a multiple of this number of bytes."""
MAX_SEGMENTS = 256
"""Maximum number of segments that a rank has open at the same time."""
MAX_SEGMENT_BYTES = 1 << 33


@dataclass(frozen=True)
class OpenSegment:
    """Client -> rank: open this segment, because tensors of later messages may be in it. Its handle follows over the control
    socket, together with one byte."""

    number: int
    """A number that is unique among the open segments."""
    nbytes: int


@dataclass(frozen=True)
class DropSegment:
    """Client -> rank: no later message uses the segment. The rank closes it once it has handled the earlier messages."""

    number: int


class Segment:
    """One end's view of a segment: `memory` [nbytes] uint8."""

    def __init__(self, number: int, memory: torch.Tensor, handle: int | None = None):
        self.number, self.memory, self.handle = number, memory, handle

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    def tensor(self, dtype: torch.dtype, shape: list[int], offset: int) -> torch.Tensor:
        """Return a view of the bytes from `offset` on. Raises ValueError if they are not aligned, or not all in the
        segment."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if offset % ALIGNMENT or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} of a segment of {self.nbytes}")
        return self.memory[offset : offset + nbytes].view(dtype).view(shape)

    def copies(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the tensors into the segment, one after the other from its start (see `bytes_of_copies`). Returns the
        copies."""
        copies, offset, tensors = [], 0, list(tensors)
        for tensor in tensors:
            copies.append(self.tensor(tensor.dtype, list(tensor.shape), offset))
            offset += bytes_of_copies((tensor,))
        copy_to_host(zip(copies, tensors, strict=True))
        return copies

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the offset of a contiguous tensor in the segment, or None if the tensor is not in it."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        inside = tensor.device.type == "cpu" and offset >= 0 and offset + tensor.nbytes <= self.nbytes
        return offset if inside and tensor.nbytes and tensor.is_contiguous() else None

    def close(self) -> None:
        """Close this end's handle. The memory stays until all tensors in it are gone on both ends."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


def bytes_of_copies(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes of a segment copies of these tensors need. Each copy is aligned."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def sharing_possible() -> bool:
    """Return whether this system supports shared segments."""
    return hasattr(os, "memfd_create")


def make_segment(number: int, nbytes: int) -> Segment:
    """Create a segment. Raises OSError if the system refuses it. Memory is used only when it is written to."""
    import fcntl

    handle = os.memfd_create("parallel-dit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(handle, nbytes)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return Segment(number, _mapped(handle, nbytes), handle)
    except BaseException:
        os.close(handle)
        raise


def open_segment(opened: OpenSegment, handle: int) -> Segment:
    """Open the rank's view of a segment, and close `handle`. Raises ValueError or OSError if it is not as `opened` says."""
    import fcntl

    try:
        if os.fstat(handle).st_size != opened.nbytes:
            raise ValueError(f"a segment of {os.fstat(handle).st_size} bytes")
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # a read beyond its end would kill the rank
            raise ValueError("a segment that can shrink")
        return Segment(opened.number, _mapped(handle, opened.nbytes))
    finally:
        os.close(handle)


def _mapped(handle: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)
