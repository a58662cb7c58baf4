"""A device that computes on the host and notes every time that a real one would have stopped it.

Its tensors are torch's own by all that can be asked of them, but lie on the device "pretend". What stops the host on CUDA
is noted: a value that is read (`item`, `equal`, a copy to the host), a result whose size depends on values (`nonzero`, a
mask as index), and a copy to the device that is not `non_blocking`. Tensors of the device and of the host do not mix, as on
CUDA. It shows how often the host stops, on any thread; not how long.
"""

import contextlib
import functools
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

READS = ("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose")
SIZED_BY_VALUES = ("nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique_dim", "_unique2", "bincount")
COPIES = ("to", "_to_copy", "cpu")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")

_noting: list["Stops"] = []
_lock = threading.Lock()


class Module(_DummyBackendModule):
    """`torch.pretend`: what `torch.random.fork_rng` asks every device for. This one draws from the host's numbers."""

    def get_rng_state(self, _device: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, _state: torch.Tensor, _device: int) -> None: ...


class Stops(list[str]):
    """Each: what stopped the host, on which thread, and the line of ours that asked for it."""

    def on(self, thread: str) -> list[str]:
        """Those of threads whose names begin so."""
        return [stop for stop in self if stop.startswith(thread)]


class OnPretend(torch.Tensor):
    """A tensor of the device; its values are in `host`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "OnPretend":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, host.size(), device=device(), **layout)
        made.host = host
        return made

    def tolist(self) -> list:
        _note("tolist")
        return self.host.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnPretend({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        if name in COPIES:
            return _copied(func, name, args, kwargs)
        if name == "copy_":
            return _copied_into(*args, **kwargs)
        if name in READS or name in SIZED_BY_VALUES:
            _note(name)
        if name in INDEXING and any(index is not None and _stops_as_index(index) for index in args[1]):
            _note(f"{name} by a mask, or from the host")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        strangers = [leaf for leaf in given if not isinstance(leaf, OnPretend) and leaf.ndim and name not in INDEXING]
        assert not strangers, f"{name} of tensors on the device and on the host"
        target = kwargs.get("device")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        host_args, host_kwargs = tree_map_only(OnPretend, lambda tensor: tensor.host, (args, kwargs))
        found = func(*host_args, **host_kwargs)
        if func._schema.is_mutable and isinstance(args[0], OnPretend) and found is host_args[0]:
            return args[0]
        if target is not None and torch.device(target).type == "cpu":
            return found
        with torch.inference_mode(all(leaf.is_inference() for leaf in given)):  # as a view of them would be
            return tree_map_only(torch.Tensor, OnPretend, found)


def device() -> torch.device:
    """The device, known to torch from the first time that somebody asks for it."""
    _register()
    return torch.device("pretend", 0)


@contextlib.contextmanager
def stops() -> Iterator[Stops]:
    """Notes what stops the host, on all threads."""
    noted = Stops()
    with _lock:
        _noting.append(noted)
    try:
        yield noted
    finally:
        with _lock:
            _noting.remove(noted)


def _note(what: str) -> None:
    frames = [
        frame for frame in traceback.extract_stack() if "torch" not in frame.filename and "/tests/" not in frame.filename
    ]
    at = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} {frames[-1].line}" if frames else "?"
    with _lock:
        for noted in _noting:
            noted.append(f"{threading.current_thread().name}: {what} at {at}")


def _stops_as_index(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8) or (not isinstance(index, OnPretend) and index.ndim > 0)


def _copied(func, name: str, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """`to`, in all the forms that it has inside torch."""
    source = args[0]
    schema = [argument.name for argument in func._schema.arguments]
    given = dict(zip(schema, args, strict=False)) | kwargs
    wanted = torch.device("cpu") if name == "cpu" else given.get("device")
    if isinstance(given.get("other"), torch.Tensor):
        wanted = given["other"].device
    here = isinstance(source, OnPretend)
    there = here if wanted is None else torch.device(wanted).type == "pretend"
    dtype = given.get("dtype") or (given["other"].dtype if "other" in given else source.dtype)
    copy = bool(given.get("copy")) or name == "_to_copy"
    if here == there and dtype == source.dtype and not copy:
        return source
    _note_transfer(here, there, bool(given.get("non_blocking")))
    made = (source.host if here else source).to(dtype, copy=copy or here != there)
    return OnPretend(made) if there else made


def _copied_into(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    here, there = isinstance(source, OnPretend), isinstance(target, OnPretend)
    _note_transfer(here, there, non_blocking)
    (target.host if there else target).copy_(source.host if here else source)
    return target


def _note_transfer(here: bool, there: bool, non_blocking: bool) -> None:
    if here and not there:
        _note("a copy to the host")
    elif there and not here and not non_blocking:
        _note("a copy to the device that is waited for")


@functools.cache
def _register() -> torch.library.Library:
    _setup_privateuseone_for_python_backend("pretend", Module())
    library = torch.library.Library("aten", "IMPL")

    def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        return OnPretend(torch.empty(size, dtype=dtype))

    def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
        return OnPretend(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source, target, non_blocking=False):
        return _copied_into(target, source, non_blocking)

    def arange(*bounds, dtype=None, layout=None, device=None, pin_memory=None):
        return OnPretend(torch.arange(*bounds, dtype=dtype))  # torch's own resizes a tensor, which a wrapper cannot follow

    for form in ("arange", "arange.start", "arange.start_step"):
        library.impl(form, arange, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return library
