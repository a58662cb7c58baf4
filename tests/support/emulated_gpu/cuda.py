"""torch.cuda on the emulated machine, and what lets a CPU build of torch have tensors of that device."""

import collections
import contextlib
import ctypes
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

from parallel_backend.core.kitchen import kitchen
from parallel_backend.wire.heartbeat import ASKING_THREAD
from testing.fake_cuda import Card

from . import graphs, host, streams
from .machine import Gpu, Machine, Violation, machine
from .tensors import CudaTensor, copy, fresh

CUDA, META = 1, 14
"""c10::DeviceType."""
LAST_BEAT = 5.0
"""Seconds."""


@contextlib.contextmanager
def emulated(*cards: Card, checks: bool = True, folder: Path | None = None) -> Iterator[Machine]:
    """Within it torch has these devices. Raises Violation at the end for what was noted; not if `checks` is False.

    `folder`: processes with the same one share the devices' memory and the record of violations. None: one of its own, which
    processes that are forked from this one share.
    """
    _let_torch_have_cuda_tensors()
    # torch keeps at the first use of a device's context which functions make tensors: `empty` below is not the real one.
    _device_constructors()
    host.page_locked.budget = None
    with contextlib.ExitStack() as stack:
        shared = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emulated-gpu-")))
        stack.enter_context(machine.of(cards, shared))
        for of in machine.gpus:
            of.default = streams.Stream(of.index)
        hip = any(card.arch for card in cards)
        # With 13 comfy-kitchen's own kernels would be launched on these devices; below it ComfyUI has those of torch alone.
        stack.enter_context(mock.patch.object(torch.version, "cuda", None if hip else "12.9"))
        kitchen.cache_clear()  # it keeps, for the process's life, what that makes of the package
        stack.callback(kitchen.cache_clear)
        stack.enter_context(mock.patch.object(torch.version, "hip", "7.0" if hip else None))
        for name, value in _FUNCTIONS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "empty", host.patched_empty(torch.empty)))
        for name, value in _METHODS.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, value))
        # A module's parameters come to the device as new ones: a wrapper has no memory that the old ones could be given.
        stack.enter_context(_overwriting_parameters())
        stack.enter_context(mock.patch.object(torch.nn.Parameter, "data", property(_data_of, _set_data), create=True))
        others = set(threading.enumerate())
        yield machine
        _let_heartbeats_end(others)
        violations = machine.record.violations
        if checks and violations:
            counts = collections.Counter(violations)
            raise Violation("\n".join(f"{count} x {text}" for text, count in counts.most_common(20)))


@functools.cache
def _let_torch_have_cuda_tensors() -> torch.library.Library:
    """What only a CUDA build registers: a guard of the device, without which torch cannot index, and how memory is made.

    The guard is the meta device's, which does nothing. It is looked for by its name in torch's library: AssertionError where
    another torch has it elsewhere.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    assert library.exists(), f"{library} is not there: emulated devices are made for a CPU build of torch on Linux"
    try:
        registry = (ctypes.c_void_p * (META + 1)).in_dll(
            ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE"
        )
    except ValueError as error:
        raise AssertionError(
            f"torch {torch.__version__} keeps its device guards elsewhere than emulated_gpu knows"
        ) from error
    assert registry[META], "torch has no guard for the meta device"
    registry[CUDA] = registry[CUDA] or registry[META]
    kernels = torch.library.Library("aten", "IMPL")

    def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        like = torch.empty(size, dtype=dtype, device="meta")  # a card's memory may be more than this machine's
        streams.gpu(device).check_room(like.nbytes)
        return fresh(torch.empty(size, dtype=dtype, memory_format=memory_format), device)

    def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
        return fresh(torch.empty_strided(size, stride, dtype=dtype), device)

    kernels.impl("empty.memory_format", empty, "CUDA")
    kernels.impl("empty_strided", empty_strided, "CUDA")
    kernels.impl("copy_", copy, "CUDA")  # torch.tensor leaves __torch_dispatch__ out
    return kernels


@contextlib.contextmanager
def _overwriting_parameters() -> Iterator[None]:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _let_heartbeats_end(others: set[threading.Thread]) -> None:
    """Rank threads' heartbeats ask their device once more after their pool's end. `others`: threads from before, such as
    those of pools of CPU ranks that a test run keeps, which may go on."""
    for thread in set(threading.enumerate()) - others:
        if thread.name in ("heartbeat", ASKING_THREAD):
            thread.join(LAST_BEAT)


def _data_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch._C.TensorBase.data.__get__(parameter)


def _set_data(parameter: torch.nn.Parameter, new: torch.Tensor) -> None:
    """Of a parameter of the host, which may come to a device by it."""
    if isinstance(new, CudaTensor):
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(new, requires_grad=False))
    else:
        torch._C.TensorBase.data.__set__(parameter, new)


def _to_cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    return tensor.to(torch.device("cuda", streams.index_of(device)), non_blocking=non_blocking)


def _of(read: Callable[[Gpu], Any]) -> Callable[..., Any]:
    """A function of torch.cuda that takes a device, or nothing for the current one."""
    return lambda device=None: read(streams.gpu(device))


def _statistics(of: Gpu) -> dict[str, int]:
    current = {"active_bytes": of.allocated, "allocated_bytes": of.allocated, "reserved_bytes": of.reserved}
    return collections.defaultdict(int, {f"{name}.all.current": value for name, value in current.items()})


def _forget_peak(of: Gpu) -> None:
    of.peak = of.allocated


def _empty_cache() -> None:
    with machine.lock:
        for of in machine.gpus:
            of.give_back()


def _nothing(*_: Any, **__: Any) -> None:
    pass


_FUNCTIONS: dict[str, Any] = {
    "_lazy_init": _nothing,
    "init": _nothing,
    "ipc_collect": _nothing,
    "is_available": lambda: bool(machine.gpus),
    "is_initialized": lambda: True,
    "device_count": lambda: len(machine.gpus),
    "current_device": lambda: streams.here.device,
    "set_device": streams.set_device,
    "device": streams.device_context,
    "get_device_name": _of(lambda of: of.card.name),
    "get_device_capability": _of(lambda of: of.card.capability),
    "get_device_properties": _of(lambda of: of.card.properties(of.index)),
    "can_device_access_peer": lambda one, two: streams.index_of(one) != streams.index_of(two),
    "is_bf16_supported": lambda including_emulation=True: streams.gpu().card.supports_bf16(including_emulation),
    "get_allocator_backend": lambda: "native",
    "mem_get_info": _of(lambda of: (of.free, of.card.memory)),
    "memory_allocated": _of(lambda of: of.allocated),
    "memory_reserved": _of(lambda of: of.reserved),
    "max_memory_allocated": _of(lambda of: of.peak),
    "reset_peak_memory_stats": _of(_forget_peak),
    "memory_stats": _of(_statistics),
    "empty_cache": _empty_cache,
    "synchronize": streams.synchronize,
    "Stream": streams.Stream,
    "Event": streams.Event,
    "stream": streams.stream_context,
    "StreamContext": streams.stream_context,
    "current_stream": streams.current_stream,
    "default_stream": _of(lambda of: of.default),
    "_sleep": lambda cycles: streams.current_stream().sleep(cycles),
    "CUDAGraph": graphs.CudaGraph,
    "graph_pool_handle": graphs.graph_pool_handle,
    "is_current_stream_capturing": lambda: streams.current_stream().capture is not None,
    "get_sync_debug_mode": lambda: machine.sync_debug_mode,
    "set_sync_debug_mode": streams.set_sync_debug_mode,
    # Numbers on the device come from the CPU's generator, as its kernels do.
    "get_rng_state": lambda device=None: torch.random.get_rng_state(),
    "set_rng_state": lambda new_state, device=None: torch.random.set_rng_state(new_state),
    "cudart": lambda: SimpleNamespace(
        cudaHostRegister=host.page_locked.register, cudaHostUnregister=host.page_locked.unregister
    ),
}
_METHODS: dict[str, Any] = {
    "pin_memory": host.pin_memory,
    "is_pinned": lambda tensor, *_: host.page_locked.has(tensor),
    "cuda": _to_cuda,
}
