"""Copies of tensors between a device and the host, with as few waits of the host as possible."""

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

log = logging.getLogger(__name__)

STAGING_BYTES, STAGING_PIECES = 16 << 20, 2
"""Bytes and number of the pieces of page-locked memory through which a device gets weights from a file."""
ALIGNMENT = 16
"""A tensor's start in a piece is rounded up to a multiple of this many bytes."""


def page_locked(device: torch.device) -> bool:
    """Whether copies to and from `device` use page-locked memory. Not on Windows: such copies fail there once a process has
    used a second GPU (ComfyUI's issue 15255)."""
    return device.type == "cuda" and sys.platform != "win32"


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor on the host for copies from and to `device`, page-locked if possible."""

    def empty(locked: bool) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=locked)

    return _or_pageable(lambda: empty(True), lambda: empty(False)) if page_locked(device) else empty(False)


def _or_pageable(locked: Callable[[], torch.Tensor], pageable: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`locked()`, or `pageable()` if the driver has no page-locked memory left. Copies are then slower but equally safe:
    when an asynchronous copy returns, CUDA has read or written pageable memory."""
    try:
        return locked()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        _tell_of_refusal(str(error).splitlines()[0])
        return pageable()


@functools.cache  # once for each text: there may be several refusals in each step
def _tell_of_refusal(error: str) -> None:
    log.warning("the driver gives no more page-locked memory (%s): copies between host and GPU are slower", error)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors on the CPU; a CPU tensor is not copied. The host waits once for all copies of a CUDA device."""
    on_gpu = [page_locked(tensor.device) for tensor in tensors]
    copies = [
        host_buffer(tensor.shape, tensor.dtype, tensor.device) if locked else tensor.cpu()
        for tensor, locked in zip(tensors, on_gpu, strict=True)
    ]
    copy_to_host([(copy, tensor) for copy, tensor, locked in zip(copies, tensors, on_gpu, strict=True) if locked])
    return copies


def copy_to_host(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors of any device into tensors of equal shapes on the CPU. Each pair is (target, source). The host waits once
    for all copies of a CUDA device, if the targets are page-locked and contiguous."""
    devices = set()
    for into, tensor in pairs:
        locked = page_locked(tensor.device)
        into.copy_(tensor, non_blocking=locked)
        if locked:
            devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def in_graph(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def to_device(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None, copy: bool = False
) -> torch.Tensor:
    """Return the tensor on the device. The host does not wait for the copy. A tensor on the device is returned itself,
    unless `copy`.

    CUDA may make the host wait for copies from memory that is not page-locked (driver API, "API synchronization behavior"),
    so the tensor is first copied into page-locked memory. The caller must not write to a tensor that was page-locked
    already, such as one in shared memory, before the device has copied it. Raises RuntimeError while a CUDA graph is
    captured.
    """
    is_upload = device.type == "cuda" and tensor.device.type == "cpu"
    if is_upload and in_graph(device):
        raise RuntimeError("a copy from the host cannot be in a CUDA graph, which would repeat it when its source is gone")
    if not (is_upload and page_locked(device)):
        return tensor.to(device, dtype, non_blocking=True, copy=copy)
    source = tensor if tensor.is_pinned() else _or_pageable(tensor.pin_memory, lambda: tensor)
    # Converted on the device: a conversion on the host would give memory that is not page-locked.
    return source.to(device, non_blocking=True).to(dtype or tensor.dtype)


class StagedUpload:
    """Copies from pageable memory, such as a mapped file, to a CUDA device, while the host continues to read.

    The host would wait for a copy from pageable memory. Here it fills one piece of page-locked memory while the device reads
    the other one. To other devices a tensor is copied at once.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.Tensor, torch.cuda.Event]] = []  # the last one is being filled
        self._filled = STAGING_BYTES

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)`, with equal shapes and any dtypes and strides. `source`: on the CPU; it may change
        afterwards. All calls must be for one device and one of its streams."""
        if not page_locked(target.device):
            target.copy_(source)
            return
        if not source.ndim:
            target, source = target.view(1), source.view(1)
        row = source[:1].nbytes
        if row > STAGING_BYTES:  # such as a table of positions, [1, places, width]
            for into, part in zip(target, source, strict=True):
                self.copy(into, part)
            return
        rows = STAGING_BYTES // max(1, row)
        for into, part in zip(target.split(rows), source.split(rows), strict=True):
            staged = self._room(part.nbytes, target.device).view(part.dtype).view(part.shape).copy_(part)
            if into.dtype == staged.dtype and into.is_contiguous():
                into.copy_(staged, non_blocking=True)
            else:  # torch would convert on the host first, and the result would be pageable again
                into.copy_(staged.to(target.device, non_blocking=True))

    def _room(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return this many bytes of memory, page-locked if possible. No copy reads it any more."""
        if self._filled + nbytes > STAGING_BYTES:
            if self._pieces:
                self._pieces[-1][1].record()  # behind the copies from it
            if len(self._pieces) < STAGING_PIECES:
                piece = host_buffer((STAGING_BYTES,), torch.uint8, device), torch.cuda.Event()
            else:
                piece = self._pieces.pop(0)
                piece[1].synchronize()
            self._pieces.append(piece)
            self._filled = 0
        start = self._filled
        self._filled += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._pieces[-1][0][start : start + nbytes]
