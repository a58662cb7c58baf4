"""Hollow tensors: of a device cuda:N, with shape, strides, dtype and lifetime, and without memory.

An operation on them runs on torch's meta tensors, which infer the result's shape and strides as a device's kernel would have
them; composite operations are taken apart first, as on a device. Memory is accounted for by its lifetime: it goes with the
last tensor that lies there. Tensors of the host are real, so that code which looks at their values runs as it is. A value
that is read from a hollow tensor is 0.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .account import Account

PRODUCTS = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "convolution", "_scaled_mm", "_int_mm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    )
)
READS = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "item", "allclose"))
"""Operations whose result the host looks at."""
WHOLE = frozenset(("_fused_rms_norm",))
"""Composite operations that have a kernel of their own on CUDA."""
NOT_LAUNCHED = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "detach_")
)
"""They make room, or nothing."""
WRITTEN_ONLY = frozenset(("copy_", "fill_", "zero_", "uniform_", "normal_"))
"""Operations in place that do not read what they write over."""
ALIGNED = 16
"""Values to whose multiple the memory-efficient kernel has a mask's rows begin (pad_bias in sdp_utils.h)."""


class Memory:
    """Memory on a device."""

    __slots__ = ("_account", "_size", "device")

    def __init__(self, device: int, nbytes: int, account: Account):
        self.device, self._account = device, account
        self._size = account.take(nbytes)

    def __del__(self):
        self._account.give(self._size)


class Hollow(torch.Tensor):
    """See above. `inner`: the meta tensor. `memory`: shared by all tensors that lie there."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory) -> "Hollow":
        if inner.is_inference() != torch.is_inference_mode_enabled():  # a view is of the kind of what it is of
            with torch.inference_mode(inner.is_inference()):
                return Hollow(inner, memory)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda", memory.device),
        )
        made.inner, made.memory = inner, memory
        return made

    def __init__(self, *_: Any):
        pass

    def tolist(self) -> list:
        return self.cpu().tolist()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, _stream: Any) -> None:
        """Does nothing: all streams are one."""

    def __repr__(self, **_: Any) -> str:
        return f"Hollow({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a hollow tensor on a thread that is not in `Devices`")


class Devices(TorchDispatchMode):
    """Context of one thread, in which devices cuda:N are hollow. `accounts`: by N."""

    def __init__(self, accounts: Sequence[Account]):
        super().__init__()
        self.accounts = accounts
        self._inferred: dict[Any, Any] = {}  # layouts of results by operation and layouts of arguments
        self._lifts: list[bool] = []  # before each __enter__

    def __enter__(self) -> Self:
        # `torch.tensor` makes its values on the host and then copies them, where a mode sees it. The flag is the thread's.
        self._lifts.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifts.pop())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("device", next((value for value in args if isinstance(value, torch.device)), None))
        target = None if target is None else torch.device(target)
        given = _tensors((args, kwargs))
        hollow = [tensor for tensor in given if isinstance(tensor, Hollow)]
        if not hollow and (target is None or target.type != "cuda"):
            return func(*args, **_without_pinning(kwargs))
        about = _about(func)
        if about.name == "copy_":
            return self._copy(*args)
        if about.name == "_to_copy" and (bool(hollow) != (target is None or target.type == "cuda")):
            return self._cross(args[0], target, kwargs)
        if about.name == "scaled_dot_product_attention":
            with self:
                return _attention(*args, **kwargs)
        if about.composite:
            with self:  # it is made of other operations
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        index = hollow[0].memory.device if target is None or (target.index is None and hollow) else target.index
        return self._run(func, about, args, kwargs, given, hollow, index or 0)

    def _run(self, func: OpOverload, about: "_About", args, kwargs, given, hollow: list[Hollow], index: int) -> Any:
        account = self.accounts[index]
        strangers = [tensor for tensor in given if not isinstance(tensor, Hollow) and tensor.ndim and hollow]
        assert not strangers or about.name in ("index", "index_put_"), f"{func} of tensors on a device and on the host"
        if about.name in READS:
            account.stops += 1
            return about.name in ("equal", "allclose") if about.name != "_local_scalar_dense" else _zero(args[0].dtype)
        made = self._wrapped(self._infer(func, args, kwargs), hollow, index)
        if about.name not in NOT_LAUNCHED and not self._is_view(about, hollow, made):
            account.kernels[about.name] += 1
            if about.name in PRODUCTS:
                account.products += 1
            else:
                account.moved[about.name] += _moved(func, about, hollow, args, kwargs, made)
        return made

    def _infer(self, func: OpOverload, args, kwargs) -> Any:
        """The results as meta tensors. Those in new memory are laid out as before for equal arguments: meta kernels are
        slow."""
        key = func, _layout(args), _layout(kwargs)
        if (layouts := self._inferred.get(key)) is not None:
            made = tuple(torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts[1])
            return made if layouts[0] else made[0]
        inner_args, inner_kwargs = _inner(args), {name: _inner(value) for name, value in kwargs.items()}
        if "device" in inner_kwargs:
            inner_kwargs["device"] = torch.device("meta")
        found = func(*inner_args, **inner_kwargs)
        several = isinstance(found, (tuple, list))
        results = found if several else (found,)
        places = {tensor.untyped_storage()._cdata for tensor in _tensors((inner_args, inner_kwargs))}
        if all(isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in places for each in results):
            self._inferred[key] = several, [(each.size(), each.stride(), each.dtype) for each in results]
        return found

    def _wrapped(self, found: Any, given: list[Hollow], index: int) -> Any:
        """The results as hollow tensors: a view lies in the memory of what it is of, a changed tensor is itself."""
        places = {tensor.inner.untyped_storage()._cdata: tensor.memory for tensor in given}
        same = {id(tensor.inner): tensor for tensor in given}
        return self._wrap(found, same, places, index)

    def _wrap(self, value: Any, same: dict[int, Hollow], places: dict[int, Memory], index: int) -> Any:
        # No closure that calls itself: such a cycle would keep tensors until Python's next garbage collection.
        if isinstance(value, (list, tuple)):
            return type(value)(self._wrap(each, same, places, index) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in same:
            tensor = same[id(value)]
            assert (tensor.shape, tensor.stride()) == (value.shape, value.stride()), "a tensor that changes its shape"
            return tensor
        storage = value.untyped_storage()
        if storage._cdata not in places:
            places[storage._cdata] = Memory(index, storage.nbytes(), self.accounts[index])
        return Hollow(value, places[storage._cdata])

    @staticmethod
    def _is_view(about: "_About", given: list[Hollow], made: Any) -> bool:
        """Whether nothing was written, and all results lie in the memory of what was given."""
        places = {id(tensor.memory) for tensor in given}
        return not about.written and all(id(tensor.memory) in places for tensor in _tensors(made))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(target, Hollow) and isinstance(source, Hollow):
            account = self.accounts[target.memory.device]
            account.kernels["copy_"] += 1
            account.moved["copy_"] += _bytes(source) + _bytes(target)
        elif isinstance(target, Hollow):
            self._crossed(target, "to the device", non_blocking)
        else:
            assert isinstance(source, Hollow)
            self._crossed(source, "to the host", non_blocking)
            target.zero_()
        return target

    def _cross(self, source: torch.Tensor, target: torch.device | None, kwargs: dict[str, Any]) -> torch.Tensor:
        """`_to_copy` between host and device."""
        dtype, blocking = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
        if isinstance(source, Hollow):
            self._crossed(source, "to the host", blocking)
            return torch.zeros(source.shape, dtype=dtype)
        assert target is not None
        layout = torch.empty_like(source, device="meta", dtype=dtype)
        index = target.index or 0
        made = Hollow(layout, Memory(index, layout.untyped_storage().nbytes(), self.accounts[index]))
        self._crossed(made, "to the device", blocking)
        return made

    def _crossed(self, tensor: Hollow, way: str, non_blocking: bool) -> None:
        account = self.accounts[tensor.memory.device]
        account.copied[way] += tensor.nbytes
        if not non_blocking:
            account.stops += 1


class _About(NamedTuple):
    name: str
    composite: bool
    written: tuple[str, ...]
    """Names of the arguments that it writes to."""


@functools.cache
def _about(func: OpOverload) -> _About:
    schema, key = func._schema, torch._C.DispatchKey.CompositeImplicitAutograd
    name = schema.name.removeprefix("aten::")
    composite = name not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    aliases = [(argument.name, argument.alias_info) for argument in schema.arguments if argument.alias_info is not None]
    written = tuple(name for name, alias in aliases if alias.is_write)
    return _About(name, composite, written)


def _attention(q_BHQD, k_BHKD, v_BHKD, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """As scaled_dot_product_attention on CUDA without gradients (attention.cpp): the flash kernel takes half precision
    without a mask, the memory-efficient one all else.

    q [B, H, Q, D], k, v [B, h, K, D], mask [B or 1, H or 1, Q or 1, K] -> [B, H, Q, D].
    """
    kernels, options = torch.ops.aten, {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if enable_gqa:
        k_BHKD, v_BHKD = (x.repeat_interleave(q_BHQD.shape[1] // x.shape[1], 1) for x in (k_BHKD, v_BHKD))
    if attn_mask is None and q_BHQD.element_size() == 2:
        return kernels._scaled_dot_product_flash_attention(q_BHQD, k_BHKD, v_BHKD, **options)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=q_BHQD.dtype)
            attn_mask = bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
        keys = k_BHKD.shape[2]
        if keys % ALIGNED:
            attn_mask = torch.nn.functional.pad(attn_mask, (0, -keys % ALIGNED))[..., :keys]
        attn_mask = attn_mask.expand(*q_BHQD.shape[:3], keys)
    return kernels._scaled_dot_product_efficient_attention(q_BHQD, k_BHKD, v_BHKD, attn_mask, False, **options)[0]


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        _collect(tuple(value.values()), found)


def _layout(value: Any) -> Any:
    """What the layout of an operation's results depends on, as a key. `kwargs` come as a dict."""
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype, isinstance(value, Hollow)
    if isinstance(value, (list, tuple)):
        return tuple(map(_layout, value))
    if isinstance(value, dict):
        return tuple((name, _layout(each)) for name, each in value.items())
    return type(value), value


def _inner(value: Any) -> Any:
    if isinstance(value, Hollow):
        return value.inner
    if isinstance(value, torch.Tensor) and value.ndim:
        return torch.empty_like(value, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_inner, value))
    return value


def _moved(func: OpOverload, about: _About, given: list[Hollow], args, kwargs, made: Any) -> int:
    written = [tensor for tensor in _tensors(made) if isinstance(tensor, Hollow)]
    if about.name in WRITTEN_ONLY or any(argument.is_out for argument in func._schema.arguments):
        given = [tensor for tensor in given if all(tensor is not other for other in written)]
    return sum(map(_bytes, given)) + sum(map(_bytes, written))


def _bytes(tensor: torch.Tensor) -> int:
    """Of its different values: an expanded tensor has one for all of an axis."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _without_pinning(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | {"pin_memory": False} if kwargs.get("pin_memory") else kwargs


def _zero(dtype: torch.dtype) -> bool | int | float | complex:
    return torch.zeros((), dtype=dtype).item()
