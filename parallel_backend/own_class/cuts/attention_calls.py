"""Replaces attention functions of a class's package, so that calls in its blocks can exchange keys between ranks."""

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from parallel_backend.core.own_class import PACKAGES, ROOTS
from parallel_backend.own_class.calls.unproven import Unproven

FUNCTIONS = {package.attention: package.functions for package in PACKAGES}
"""Module -> beginning of the names of its attention functions."""
REPLACES = "parallel_dit_replaces"
"""Attribute of a replacement: the attention function that it replaces."""
KEPT = "parallel_dit_kept"
"""Attribute of a tensor of row numbers: the cache that `kept_with` fills."""
Kept = TypeVar("Kept")
Attend = Callable[..., torch.Tensor]
"""(function, *its arguments) -> the tensor that the function would return."""
Traced = Callable[..., torch.Tensor]
"""(name of a replacement, *its arguments) -> the replacement's result. torch.compile sees it as one operation."""


def call_itself(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call the attention function without any exchange between ranks."""
    return function(*args, **kwargs)


def is_attention(value: Any) -> bool:
    """Whether `value` is an attention function of PACKAGES."""
    functions = FUNCTIONS.get(value.__module__) if inspect.isfunction(value) else None
    return functions is not None and value.__name__.startswith(functions)


def module_global(kind: type, name: str) -> Any:
    """Return the present value of this global in the module of class `kind`. An attention function may be a replacement
    (_Replaced)."""
    return vars(sys.modules[kind.__module__])[name]


class _Replaced:
    """Replaces the attention functions in all imported modules of PACKAGES, as long as any thread asks for it. In threads
    that did not ask, a replacement calls the original function: ComfyUI may sample at the same time."""

    def __init__(self) -> None:
        self._lock, self._asking = threading.Lock(), 0
        self._thread = threading.local()
        self._originals: list[tuple[dict[str, Any], str, Any]] = []
        self._found: list[tuple[dict[str, Any], str]] = []
        self._imported: tuple[int, Any] = 0, None  # when they were found
        self._modules: dict[str, tuple[Any, int]] = {}  # those of PACKAGES, and how many names each had
        self._replacements: dict[Any, Any] = {}  # by function
        self.by_name: dict[str, Callable[..., torch.Tensor]] = {}  # replacements with ComfyUI's signature
        self.traced: Traced | None = None

    def ask(self) -> None:
        """Replace the functions. They stay replaced until `leave` has been called as often as `ask`."""
        with self._lock:
            self._asking += 1
            if self._asking == 1 or self._imported != _imported():  # a search takes a good part of a small call
                self._replace()

    def leave(self) -> None:
        """The inverse of `ask`."""
        with self._lock:
            self._asking -= 1
            if not self._asking:
                for names, name, function in self._originals:
                    names[name] = function
                self._originals.clear()

    @contextmanager
    def by(self, attend: Attend) -> Iterator[None]:
        """Context in which this thread's calls go to `attend`."""
        self.ask()
        before, self._thread.attend = getattr(self._thread, "attend", None), attend
        try:
            yield
        finally:
            self._thread.attend = before
            self.leave()

    def _replace(self) -> None:
        """Replace the functions in all modules, also in those imported since. Names are searched only if modules have
        changed."""
        imported = _imported()
        if imported != self._imported or self._modules_changed():
            modules = {place: module for place, module in list(sys.modules.items()) if place.startswith(ROOTS)}
            self._imported = imported
            self._modules = {place: (module, len(vars(module))) for place, module in modules.items()}
            self._found = [
                (vars(module), name)
                for module in modules.values()
                for name, value in list(vars(module).items())
                if is_attention(value)
            ]
        for names, name in self._found:
            value: Any = names.get(name)
            if is_attention(value) and not hasattr(value, REPLACES):  # it may be another one since it was found
                self._originals.append((names, name, value))
                if value not in self._replacements:
                    self._replacements[value] = self._replacement(value)
                names[name] = self._replacements[value]

    def _modules_changed(self) -> bool:
        """Whether sys.modules has another module under a name, or a module has other names in it, because another thread
        imported it."""
        now = sys.modules.get
        return any(
            now(place) is not module or len(vars(module)) != names for place, (module, names) in self._modules.items()
        )

    def _replacement(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        name = f"{function.__module__}.{function.__name__}"

        @functools.wraps(function)
        def replacement(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.traced is not None and torch.compiler.is_dynamo_compiling():
                return self.traced(name, *map(_taken, (q, k, v)), *args, **kwargs)
            return self.attend(function, q, k, v, *args, **kwargs)

        setattr(replacement, REPLACES, function)
        self.by_name[name] = replacement
        return replacement

    def attend(
        self, function: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Call this thread's `attend` instead of the function. If the thread has none, call the function."""
        attend = getattr(self._thread, "attend", None)
        if attend is None:
            return function(q, k, v, *args, **kwargs)
        tensors = map(_taken, (q, k, v))
        self._thread.attend = None  # the function may call another one
        try:
            return attend(function, *tensors, *args, **kwargs)
        finally:
            self._thread.attend = attend


def _imported() -> tuple[int, Any]:
    """Return the number of imported modules, and the module imported last."""
    return len(sys.modules), next(reversed(sys.modules.values()))


def _taken(given: Any) -> torch.Tensor:
    """Return the given tensor. ComfyUI may pass a container that hands out its tensor only once."""
    return given if isinstance(given, torch.Tensor) else given.take()


@functools.cache
def _replaced() -> _Replaced:
    return _Replaced()


def replace_attention() -> Callable[[], None]:
    """Replace the functions now, so that later `attention_by` contexts start fast. Returns the function that restores
    them."""
    replaced = _replaced()
    replaced.ask()
    return replaced.leave


def attention_by(attend: Attend) -> Any:
    """Context in which this thread's calls of the attention functions go to `attend`."""
    return _replaced().by(attend)


def attend_now(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a function that is not replaced, such as one of ours, as if it were a replaced attention function."""
    return _replaced().attend(function, *args, **kwargs)


def trace_attention_by(traced: Traced) -> None:
    """From now on, code that this process compiles calls `traced` instead of the replacements."""
    _replaced().traced = traced


def replacement_of(name: str) -> Callable[..., torch.Tensor]:
    """Return the replacement with this name, which is the first argument of Traced."""
    return _replaced().by_name[name]


AttendAll = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""([B, q, H, D], [B, k, H, D], [B, k, H, D]) -> [B, q, H, D]: attention of all these queries to all these keys."""


class Rows(NamedTuple):
    """The queries, keys and values of a call that one rank or band has: rows in any order, all heads or some."""

    q_BQHD: torch.Tensor
    k_BKHD: torch.Tensor
    v_BKHD: torch.Tensor
    queries_Q: torch.Tensor
    """int64 in host memory: each query's number among all query tokens of the call, in the class's order."""
    keys_K: torch.Tensor
    """int64 in host memory: each key's number among all key tokens of the call, in the class's order."""


RowRule = Callable[[AttendAll, Rows], torch.Tensor]
"""Computes attention [B, Q, H, D] in which not every query sees every key. It calls AttendAll, the user's kernel, for each
group of queries and their keys. A rule is a frozen dataclass, hashable and picklable, with facts such as a grid of
tokens."""


@dataclass(slots=True, eq=False)  # not frozen: it is made for every call, and freezing takes as long as the rest
class AttentionCall:
    """One call of an attention function, with its arguments in one form."""

    function: Callable[..., torch.Tensor]
    q_BQHD: torch.Tensor
    k_BKHD: torch.Tensor
    v_BKHD: torch.Tensor
    mask: torch.Tensor | None
    """The mask as the class passes it."""
    heads_first: bool
    """Whether the class wants [B, H, Q, D] back. False: [B, Q, H x D]."""
    arguments: Mapping[str, Any]
    """Other arguments of the call, by name."""
    shares_keys: bool = False
    """Whether several query heads share one key head (grouped-query attention). k and v here have the head repeated."""
    rule: RowRule | None = None
    """Says which queries see which keys. None: all queries see all keys."""

    @property
    def key_mask(self) -> torch.Tensor | None:
        """[b, K] bool, the keys that queries attend to; b is B or 1. None: all keys. Raises Unproven for causal calls and
        for masks that differ by query or head, because ranks have tokens in another order."""
        if self.arguments.get("is_causal"):
            raise Unproven("its attention is causal")
        if (mask := self.mask) is None:
            return None
        of_queries = mask.shape[:-1] if mask.ndim < 3 else mask.shape[1:-1]  # [Q, K], [B, Q, K] or [B, H, Q, K]
        if any(size > 1 for size in of_queries):
            raise Unproven("its attention has a mask that is not a mask of keys")
        rows = mask.reshape(-1, mask.shape[-1])
        return rows if rows.dtype == torch.bool else rows >= 0

    def compute(
        self, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor, mask_bK: torch.Tensor | None
    ) -> torch.Tensor:
        """Return attention [B, Q, h, D] by the class's function, of these heads only, under this mask of keys."""
        mask = None if mask_bK is None else mask_bK[:, None, None]
        q_BhQD, k_BhKD, v_BhKD = q_BQhD.transpose(1, 2), k_BKhD.transpose(1, 2), v_BKhD.transpose(1, 2)
        shapes = {"skip_reshape": True, "skip_output_reshape": True}
        out_BhQD = self.function(q_BhQD, k_BhKD, v_BhKD, q_BQhD.shape[2], mask=mask, **self.arguments, **shapes)
        return out_BhQD.transpose(1, 2)

    def result(self, out_BQHD: torch.Tensor) -> torch.Tensor:
        """Return the output [B, Q, H, D] in the form that the class wants: see `heads_first`."""
        return out_BQHD.transpose(1, 2) if self.heads_first else out_BQHD.flatten(2)


def shares_keys(k_BKHD: torch.Tensor, v_BKHD: torch.Tensor, sharing: int) -> bool:
    """Whether each group of `sharing` neighbouring heads has the same keys and values."""
    if k_BKHD.shape[2] % sharing:
        return False
    # Tokens of other bands are NaN.
    groups = (each.nan_to_num().unflatten(2, (-1, sharing)) for each in (k_BKHD, v_BKHD))
    return all(torch.equal(each, each[:, :, :, :1].expand_as(each)) for each in groups)


def attention_call(
    function: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    rule: RowRule | None = None,
    **others: Any,
) -> AttentionCall:
    """The AttentionCall of a function with ComfyUI's signature. Key heads that several query heads share are repeated."""
    if skip_reshape:
        q_BQHD, k_BKHD, v_BKHD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    else:
        size = q.shape[-1] // heads
        # Some have heads apart already, and some have no tokens, whose heads torch could not count.
        q_BQHD, k_BKHD, v_BKHD = (x.reshape(*x.shape[:2], math.prod(x.shape[2:]) // size, size) for x in (q, k, v))
    if (shared := q_BQHD.shape[2] // k_BKHD.shape[2]) > 1:
        k_BKHD, v_BKHD = (x.repeat_interleave(shared, dim=2) for x in (k_BKHD, v_BKHD))
    others.pop("enable_gqa", None)
    others["attn_precision"] = attn_precision
    return AttentionCall(function, q_BQHD, k_BKHD, v_BKHD, mask, skip_output_reshape, others, shared > 1, rule)


@torch.compiler.disable  # it decides by numbers on the host
def attention_by_rows(rule: RowRule, q_BQHD: torch.Tensor, k_BKHD: torch.Tensor, v_BKHD: torch.Tensor) -> torch.Tensor:
    """Return attention [B, Q, H, D] by a rule. Ranks cut and exchange it as they do any other attention call."""
    tensors = (x.transpose(1, 2) for x in (q_BQHD, k_BKHD, v_BKHD))
    shapes = {"skip_reshape": True, "skip_output_reshape": True}
    return attend_now(attention_rows, *tensors, q_BQHD.shape[2], rule=rule, **shapes).transpose(1, 2)


def attention_rows(
    q_BHQD: torch.Tensor,
    k_BHKD: torch.Tensor,
    v_BHKD: torch.Tensor,
    _heads: int,
    rule: RowRule | None = None,
    scale: float | None = None,
    **_shapes: Any,
) -> torch.Tensor:
    """Attention [B, H, Q, D] by a rule over all tokens, with ComfyUI's signature. No rule: all queries see all keys."""
    if rule is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, scale=scale)

    def attend(q_BqHD: torch.Tensor, k_BkHD: torch.Tensor, v_BkHD: torch.Tensor) -> torch.Tensor:
        q_BHqD, k_BHkD, v_BHkD = (x.transpose(1, 2) for x in (q_BqHD, k_BkHD, v_BkHD))
        return F.scaled_dot_product_attention(q_BHqD, k_BHkD, v_BHkD).transpose(1, 2)

    tensors = [x.transpose(1, 2) for x in (q_BHQD, k_BHKD, v_BHKD)]
    numbers = (torch.arange(x.shape[1]) for x in tensors[:2])
    return rule(attend, Rows(*tensors, *numbers)).transpose(1, 2)


def kept_with(numbers: torch.Tensor, key: Hashable, make: Callable[[], Kept]) -> Kept:
    """Return the result of `make`, cached on the tensor `numbers` under `key`, such as rows by group on a device. A rank
    passes a rule the same tensor in all layers and in all calls with the same tokens."""
    kept = vars(numbers).setdefault(KEPT, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]
