"""Tensors of device cuda:N, and what torch's operators do with them.

CudaTensor is a wrapper: by all that can be asked of it, a tensor of its device; its values are in a CPU tensor. torch's
composite operators come as their parts, but for a few whose CPU path gives the same bits only when it runs whole (WHOLE).
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from .host import POISON, Download, Upload, page_locked
from .machine import machine, merge, where
from .memory import Store, stores
from .operators import leaves, mutated_by, operator_of
from .streams import Stream, current_stream, here, index_of, stop

READS = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "item", "allclose"))
"""Operators that bring a value to the host."""
SIZED_BY_VALUES = frozenset(
    ("nonzero", "nonzero_numpy", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "argwhere", "bincount")
)
INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"))


class CudaTensor(torch.Tensor):
    """A tensor of an emulated device. `inner`: its values, on the CPU. `store`: the device's memory that they are in."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: torch.Tensor
    store: Store

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int, store: Store | None = None) -> "CudaTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda", index),
        )
        made.inner, made.store = inner, store or _store_of(inner, index)
        # Lazy: torch resolves them before an operator comes to __torch_dispatch__, which no longer looks at `inner`'s.
        torch._C._set_conj(made, inner.is_conj())
        torch._C._set_neg(made, inner.is_neg())
        return made

    def __init__(self, *_: Any, **__: Any):
        pass

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if isinstance(new, CudaTensor):
            torch._C.TensorBase.data.__set__(self, new)
            self.inner, self.store = new.inner, new.store
        else:  # torch allows it: from now on the tensor is the host's
            new = new.detach()
            is_parameter = getattr(self, "_is_param", False)
            torch.utils.swap_tensors(self, torch.nn.Parameter(new, False) if is_parameter else new.view(new.shape))

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def record_stream(self, stream: Stream) -> None:
        self.store.recorded.add(stream)

    def is_pinned(self, *_: Any) -> bool:
        return False

    def pin_memory(self, *_: Any) -> torch.Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        new = self.clone()
        return torch.nn.Parameter(new, self.requires_grad) if getattr(self, "_is_param", False) else new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError("an emulated tensor cannot be pickled")

    def __repr__(self, **_: Any) -> str:
        return f"tensor({self.inner.flatten()[:8].tolist()}..., {list(self.shape)}, {self.dtype}, device='{self.device}')"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else repr(self)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if any(
            kind not in _KNOWN for kind in types
        ):  # a tensor made of others, such as ComfyUI's quantised ones, goes first
            return NotImplemented
        return _dispatch(func, args, kwargs or {})


_KNOWN = {CudaTensor, torch.Tensor, torch.nn.Parameter}


def _dispatch(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    about = operator_of(func)
    if about.name == "copy_":
        return copy(*args, **kwargs)
    if about.name == "_to_copy":
        return _to_copy(*args, **kwargs)
    if about.composite:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Python, False):
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    if about.name in _SPECIAL:
        return _SPECIAL[about.name](func, args, kwargs)
    return run(func, args, kwargs)


def run(func: OpOverload, args: tuple, kwargs: dict[str, Any], work: Callable[..., Any] | None = None) -> Any:
    """An operator on the current stream of its tensors' device. `work`: computes it, instead of the CPU's kernel."""
    about = operator_of(func)
    tensors = [*leaves(args), *leaves(kwargs.values())]
    index = _device_of(about.name, tensors)
    kwargs = dict(kwargs)
    target = kwargs.get("device")
    if target is not None:
        target = torch.device(target)
        kwargs["device"] = torch.device("cpu") if target.type == "cuda" else target
    elif "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    stream = current_stream(index)
    _note_stops(about.name, args, stream)
    mutated = [] if about.view or about.like else [t for t in mutated_by(func, args, kwargs) if isinstance(t, CudaTensor)]
    reads = [] if about.view or about.like else [t for t in tensors if isinstance(t, CudaTensor) and not _among(t, mutated)]
    begin(stream, reads, mutated)
    inner_args, inner_kwargs = [bare(each) for each in args], {name: bare(each) for name, each in kwargs.items()}
    capture = None if about.view else stream.capture
    if capture is not None:
        capture.keep([tensor.inner for tensor in mutated])
    work = work or func
    found = work(*inner_args, **inner_kwargs)
    if capture is not None:
        capture.add(work, inner_args, inner_kwargs, found)
    elif here.capture is not None and any(tensor.store.capture == here.capture.number for tensor in reads):
        for each in leaves([found]):  # the replay alone computes what was read
            torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage()).fill_(POISON)
    for tensor in mutated:
        _refresh(tensor)
    if target is not None and target.type != "cuda":
        return found
    return _wrapped(found, index if target is None or target.index is None else target.index, stream, mutated)


def begin(stream: Stream, reads: Iterable[CudaTensor], writes: Iterable[CudaTensor]) -> None:
    """An operation of the stream begins. In a capture nothing does: the replay is what reads and writes."""
    if here.capture is not None and stream.capture is not here.capture:
        machine.record.violation(f"an operation on {stream} is not in the graph that is captured beside it")
    with machine.lock:
        if stream.capture is not None:
            stream.capture.uses([t.store for t in reads], [t.store for t in writes])
            return
        stream.op()
        for tensor in reads:
            tensor.store.read(stream)
        for tensor in writes:
            tensor.store.write(stream)


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Tensor.copy_, where one of the two is on a device."""
    if torch.device("meta") in (target.device, source.device):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if isinstance(target, CudaTensor):
        if isinstance(source, CudaTensor):
            _between_devices(target, source)
        else:
            _to_device(target, source, non_blocking)
    elif isinstance(source, CudaTensor):
        _to_host(target, source, non_blocking)
    return target


def _between_devices(target: CudaTensor, source: CudaTensor) -> None:
    """On the source's stream, with which the target's waits both ways (torch's Copy.cu)."""
    stream, other = current_stream(source.get_device()), current_stream(target.get_device())
    if stream is not other:
        with machine.lock:
            other.op()
            merge(stream.clock, other.clock)
    begin(stream, [source], [target])
    _captured_copy(stream, target.inner, source.inner)
    if stream is not other:
        with machine.lock:
            merge(other.clock, stream.clock)


def _to_device(target: CudaTensor, source: torch.Tensor, non_blocking: bool) -> None:
    stream = current_stream(target.get_device())
    straight = source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    locked = page_locked.has(source)
    if not source.numel() or (locked and straight and non_blocking):  # nothing to copy has no address
        pass
    elif locked and not straight:
        stop("a copy to the device by way of pageable memory, since dtype or strides differ")
    elif locked:
        stop("a copy to the device that is waited for")
    else:
        stop(f"a copy to the device from pageable memory{' (non_blocking)' if non_blocking else ''}")
    begin(stream, [], [target])
    _captured_copy(stream, target.inner, source)
    if stream.capture is not None:
        return
    with machine.lock:
        for entry in stream.gpu.pending:
            if isinstance(entry, Download) and entry.overlaps(source.data_ptr(), source.nbytes):
                machine.record.violation(f"a copy to the device from memory that has not come: {entry}")
        if locked and straight and non_blocking:
            stream.gpu.pending.append(Upload(stream, source, where()))
    if not non_blocking:
        stream.reach()


def _to_host(target: torch.Tensor, source: CudaTensor, non_blocking: bool) -> None:
    stream = current_stream(source.get_device())
    straight = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    begin(stream, [source], [])
    if non_blocking and straight and page_locked.has(target):
        if stream.capture is not None:
            raise NotImplementedError("a copy to the host in a graph")
        with machine.lock, torch.inference_mode(source.inner.is_inference()):
            stream.gpu.pending.append(Download(stream, target, source.inner.clone(), where()))
        return
    stop("a copy to the host")
    stream.reach()
    target.copy_(source.inner)


def _captured_copy(stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
    if stream.capture is not None:
        stream.capture.keep([target])
        stream.capture.add(torch.Tensor.copy_, [target, source], {}, target)
    target.copy_(source)


def _to_copy(
    source: torch.Tensor,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    values = source.inner if isinstance(source, CudaTensor) else source
    target = source.device if device is None else torch.device(device)
    if target.type == "meta":
        return torch.ops.aten._to_copy(values, dtype=dtype, device="meta")
    if target.type == "cuda":
        target = torch.device("cuda", index_of(target))
    if isinstance(source, CudaTensor) and target == source.device:
        same = functools.partial(torch.ops.aten._to_copy, dtype=dtype, memory_format=memory_format)
        return run(torch.ops.aten.clone.default, (source,), {}, same)
    kept = torch.preserve_format if memory_format is None else memory_format
    like = torch.empty_like(values, dtype=dtype or source.dtype, memory_format=kept)
    if target.type == "cuda":
        return copy(CudaTensor(like, index_of(target)), source, non_blocking)
    if non_blocking and like.is_contiguous():  # torch takes page-locked memory for these
        like = page_locked.empty(like.shape, like.dtype)
    return copy(like, source, non_blocking)


def _flash(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """(output, log-sum-exp, ...) by the CPU's kernel in the place of CUDA's."""
    if args[0].dtype == torch.float32:
        raise RuntimeError("Expected query, key and value to be bf16 or fp16")

    def work(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, scale=scale)
        nothing = torch.empty(0, dtype=torch.int64)
        return out, lse, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing

    return run(func, args, kwargs, work)


def _efficient(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """As _flash: the kernel for fp32 and for masks, whose log-sum-exp is padded."""

    def work(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, scale=None):
        if bias is not None and any(stride % (16 // bias.element_size()) for stride in bias.stride()[:-1]):
            raise RuntimeError("attn_bias is not correctly aligned")
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("nan"))
        nothing = torch.empty(0, dtype=torch.int64)
        return out, lse, nothing, nothing

    return run(func, args, kwargs, work)


_SPECIAL: dict[str, Callable[[OpOverload, tuple, dict[str, Any]], Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "is_pinned": lambda *_: False,
}


def fresh(inner: torch.Tensor, device: Any) -> CudaTensor:
    """A new tensor on the device, which nothing has written yet."""
    return CudaTensor(inner, index_of(device))


def new_in(found: Any, *given: Any) -> list[torch.Tensor]:
    """Of an operation's outputs, one for each piece of memory that it was not given."""
    known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(given)}
    new: dict[int, torch.Tensor] = {}
    for output in _tensors(found):
        at = output.untyped_storage().data_ptr()
        if at not in known and output.untyped_storage().nbytes():
            new.setdefault(at, output)
    return list(new.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bare(value: Any) -> Any:
    """The value with the CPU tensors of its tensors on devices."""
    if isinstance(value, CudaTensor):
        return value.inner
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(bare(each) for each in value)
    return value


def _store_of(inner: torch.Tensor, index: int) -> Store:
    storage = inner.untyped_storage()
    with machine.lock:
        store = stores.get(storage._cdata)
        if store is None:
            store = stores[storage._cdata] = Store(machine.gpus[index], storage)
        return store


def _device_of(name: str, tensors: list[torch.Tensor]) -> int:
    """The one that all are on. RuntimeError as CUDA's."""
    devices = {tensor.get_device() for tensor in tensors if isinstance(tensor, CudaTensor)}
    others = {
        tensor.device.type
        for tensor in tensors
        if not isinstance(tensor, CudaTensor) and (tensor.is_meta or (tensor.ndim and name not in INDEXING))
    }
    if len(devices) + len(others) > 1:
        several = ", ".join([*(f"cuda:{index}" for index in sorted(devices)), *sorted(others)])
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {several} (in {name})")
    return devices.pop()


def _note_stops(name: str, args: tuple, stream: Stream) -> None:
    if name in READS or name in SIZED_BY_VALUES:
        stop(name)
        stream.reach()
    if name in INDEXING:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                stop(f"{name} by a mask")
            elif index is not None and not isinstance(index, CudaTensor) and index.ndim:
                stop(f"{name} by an index of the host's")


def _among(tensor: torch.Tensor, tensors: list[CudaTensor]) -> bool:
    return any(tensor is other for other in tensors)


def _refresh(tensor: CudaTensor) -> None:
    """An operator has given the values of the tensor another shape or another storage."""
    inner = tensor.inner
    as_before = tensor.shape, tensor.stride(), tensor.storage_offset()
    if as_before != (inner.shape, inner.stride(), inner.storage_offset()):
        storage = inner.untyped_storage()
        with machine.lock:
            stores.pop(storage._cdata, None)
        new = CudaTensor(inner, tensor.get_device())
        torch._C.TensorBase.data.__set__(tensor, new)
        tensor.store = new.store


def _wrapped(found: Any, index: int, stream: Stream, mutated: list[CudaTensor]) -> Any:
    if isinstance(found, torch.Tensor):
        for tensor in mutated:
            if tensor.inner is found:
                return tensor
        if isinstance(found, CudaTensor) or found.is_meta:
            return found
        with machine.lock:
            store = stores.get(found.untyped_storage()._cdata)
        with torch.inference_mode(found.is_inference()):
            made = CudaTensor(found, index, store)
        if store is None and stream.capture is None:
            made.store.writer = stream, stream.tick
        return made
    if isinstance(found, (list, tuple)):
        return type(found)(_wrapped(each, index, stream, mutated) for each in found)
    return found
