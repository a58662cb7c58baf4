"""Memory that the client shares with the ranks of its own machine, for tensors that are too large for a pipe.

The client makes a segment, writes tensors into it, and says in a message's header where they are. Where the system has
files in memory without a name (Linux), a segment's handle travels over the control socket, which nobody else can open: it
has no name to be guessed or left behind, is not bound by the size of /dev/shm, and goes with the last process that has it.
Windows has named segments, which go with the last handle too; their names are random. Other systems, and ranks elsewhere,
are sent everything over the pipe.
"""

import mmap
import os
import secrets
import sys
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Bytes: a tensor in a segment starts at a multiple of it."""
MAX_SEGMENTS = 256
"""Segments that a rank has open at a time, at most."""
MAX_SEGMENT_BYTES = 1 << 33


@dataclass(frozen=True)
class OpenSegment:
    """Client -> rank: messages from now on may have tensors in this segment."""

    number: int
    """Names the segment in messages. No other open one has it."""
    nbytes: int
    name: str
    """As the system calls it. Empty: its handle follows over the control socket, with one byte."""


@dataclass(frozen=True)
class DropSegment:
    """Client -> rank: no message uses it any more. The rank lets it go once it has done what it was sent before."""

    number: int


class Segment:
    """One end's view of a segment: `memory` [nbytes] uint8."""

    def __init__(self, number: int, memory: torch.Tensor, handle: int | None = None, name: str = ""):
        self.number, self.memory, self.handle, self.name = number, memory, handle, name

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    def tensor(self, dtype: torch.dtype, shape: list[int], offset: int) -> torch.Tensor:
        """A view of the bytes from `offset` on. ValueError where they are not all in the segment, or not aligned."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if offset % ALIGNMENT or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} of a segment of {self.nbytes}")
        return self.memory[offset : offset + nbytes].view(dtype).view(shape)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a contiguous tensor lies in the segment; None if it does not."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        inside = tensor.device.type == "cpu" and offset >= 0 and offset + tensor.nbytes <= self.nbytes
        return offset if inside and tensor.nbytes and tensor.is_contiguous() else None

    def close(self) -> None:
        """Let this end's handle go. The memory stays as long as a tensor, or the other end, has it."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


def sharing_possible() -> bool:
    """Whether this system has segments of either kind."""
    return hasattr(os, "memfd_create") or sys.platform == "win32"


def make_segment(number: int, nbytes: int) -> Segment:
    """A new segment. OSError where the system refuses one. It takes memory as it is written to."""
    if sys.platform == "win32":
        name = f"parallel-dit-{secrets.token_hex(16)}"
        return Segment(number, _named(name, nbytes), name=name)
    import fcntl

    handle = os.memfd_create("parallel-dit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(handle, nbytes)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return Segment(number, _mapped(handle, nbytes), handle)
    except BaseException:
        os.close(handle)
        raise


def open_segment(opened: OpenSegment, handle: int | None) -> Segment:
    """The other end of a segment; closes `handle`. ValueError or OSError for one that is not as `opened` says."""
    if handle is None:
        return Segment(opened.number, _named(opened.name, opened.nbytes))
    import fcntl

    try:
        if os.fstat(handle).st_size != opened.nbytes:
            raise ValueError(f"a segment of {os.fstat(handle).st_size} bytes")
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # a read beyond its end would kill the rank
            raise ValueError("a segment that can shrink")
        return Segment(opened.number, _mapped(handle, opened.nbytes))
    finally:
        os.close(handle)


def _named(name: str, nbytes: int) -> torch.Tensor:
    if sys.platform != "win32":
        raise ValueError("a segment with a name")
    return torch.frombuffer(mmap.mmap(-1, nbytes, tagname=name), dtype=torch.uint8)


def _mapped(handle: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)
