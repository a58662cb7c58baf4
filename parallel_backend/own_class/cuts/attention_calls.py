"""Attention functions of a class's package, whose calls in its blocks go to the ranks' exchange."""

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
"""Attribute of a function that replaces an attention function: the original function."""
KEPT = "parallel_dit_kept"
"""Attribute of a tensor of row numbers with the cache of `kept_with`."""
Kept = TypeVar("Kept")
Attend = Callable[..., torch.Tensor]
"""(function, *its arguments) -> what the function would return."""
Traced = Callable[..., torch.Tensor]
"""(name of a replacement, *its arguments) -> what it returns, in a form that torch.compile takes as one operation."""


def call_itself(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attend by the function."""
    return function(*args, **kwargs)


def is_attention(value: Any) -> bool:
    """Whether `value` is an attention function of PACKAGES."""
    functions = FUNCTIONS.get(value.__module__) if inspect.isfunction(value) else None
    return functions is not None and value.__name__.startswith(functions)


def module_global(kind: type, name: str) -> Any:
    """The object that a class's module has under this name now. An attention function may be a trial's or a rank's."""
    return vars(sys.modules[kind.__module__])[name]


class _Replaced:
    """The functions in all modules of PACKAGES that are imported, replaced as long as a thread asks for it.

    The replacements call the functions themselves in all other threads: ComfyUI may sample meanwhile.
    """

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
        """Replace the functions until `leave` is called as often."""
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
        """Modules that were imported since the last time, too. Only then all names are looked through, which takes ms."""
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
        """A module may have been put in another's place, or have been in the middle of its import (by another thread)."""
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
        """A call of the function, which goes to this thread's `attend` if it has one."""
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
    """Number of modules, and the newest."""
    return len(sys.modules), next(reversed(sys.modules.values()))


def _taken(given: Any) -> torch.Tensor:
    """The tensor itself: ComfyUI may pass a container that hands its tensor over once."""
    return given if isinstance(given, torch.Tensor) else given.take()


@functools.cache
def _replaced() -> _Replaced:
    return _Replaced()


def replace_attention() -> Callable[[], None]:
    """Replace the attention functions, so that `attention_by` need not. Returns the function that undoes it."""
    replaced = _replaced()
    replaced.ask()
    return replaced.leave


def attention_by(attend: Attend) -> Any:
    """Context in which this thread's calls of the attention functions go to `attend`."""
    return _replaced().by(attend)


def attend_now(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A call of a function that is none of those replaced, as if it were one."""
    return _replaced().attend(function, *args, **kwargs)


def trace_attention_by(traced: Traced) -> None:
    """From now on `traced` stands for the replacements in code that this process compiles."""
    _replaced().traced = traced


def replacement_of(name: str) -> Callable[..., torch.Tensor]:
    """The replacement that Traced is told the name of."""
    return _replaced().by_name[name]


AttendAll = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""([B, q, H, D], [B, k, H, D], [B, k, H, D]) -> [B, q, H, D]: all of these queries see all of these keys."""


class Rows(NamedTuple):
    """Rows of a call's queries, keys and values: a rank's, or a band's, in any order, of all heads or some."""

    q_BQHD: torch.Tensor
    k_BKHD: torch.Tensor
    v_BKHD: torch.Tensor
    queries_Q: torch.Tensor
    """int64 in host memory: the number of each query among all tokens of the call's queries, in the class's order."""
    keys_K: torch.Tensor
    """The same of the keys."""


RowRule = Callable[[AttendAll, Rows], torch.Tensor]
"""Attention [B, Q, H, D] in which not every query sees every key. The function that it gets computes by the user's kernel. A
rule is a frozen dataclass, hashable and picklable, of the facts of a call, such as a grid of tokens."""


@dataclass(slots=True, eq=False)  # not frozen: it is made for every call, and freezing takes as long as the rest
class AttentionCall:
    """A call of attention, by `function`."""

    function: Callable[..., torch.Tensor]
    q_BQHD: torch.Tensor
    k_BKHD: torch.Tensor
    v_BKHD: torch.Tensor
    mask: torch.Tensor | None
    """As the class gives it."""
    heads_first: bool
    """The class wants [B, H, Q, D] back, and not [B, Q, H x D]."""
    arguments: Mapping[str, Any]
    """Others, by name."""
    shares_keys: bool = False
    """Several query heads may share one head of keys, which is repeated here."""
    rule: RowRule | None = None
    """Says which queries see which keys. None: all see all."""

    @property
    def key_mask(self) -> torch.Tensor | None:
        """[b, K] bool, the keys that queries attend to; b is B or 1. None: all. Unproven for a mask of queries or heads and
        for a causal call, because ranks have tokens in another order."""
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
        """Attention by the function, of these heads, in which all queries see all keys. Returns [B, Q, h, D]."""
        mask = None if mask_bK is None else mask_bK[:, None, None]
        q_BhQD, k_BhKD, v_BhKD = q_BQhD.transpose(1, 2), k_BKhD.transpose(1, 2), v_BKhD.transpose(1, 2)
        shapes = {"skip_reshape": True, "skip_output_reshape": True}
        out_BhQD = self.function(q_BhQD, k_BhKD, v_BhKD, q_BQhD.shape[2], mask=mask, **self.arguments, **shapes)
        return out_BhQD.transpose(1, 2)

    def result(self, out_BQHD: torch.Tensor) -> torch.Tensor:
        """The output in the form that the class asked for."""
        return out_BQHD.transpose(1, 2) if self.heads_first else out_BQHD.flatten(2)


def shares_keys(k_BKHD: torch.Tensor, v_BKHD: torch.Tensor, sharing: int) -> bool:
    """Whether each `sharing` heads in a row have the same keys and values."""
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
    """The call of a function with ComfyUI's signature. Heads of keys that queries share are repeated."""
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
    """[B, Q, H, D]. Ranks cut and exchange the call as they do any other one of attention."""
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
    """[B, H, Q, D] of a call with all tokens, in the form of ComfyUI's functions. None: all queries see all keys."""
    if rule is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, scale=scale)

    def attend(q_BqHD: torch.Tensor, k_BkHD: torch.Tensor, v_BkHD: torch.Tensor) -> torch.Tensor:
        q_BHqD, k_BHkD, v_BHkD = (x.transpose(1, 2) for x in (q_BqHD, k_BkHD, v_BkHD))
        return F.scaled_dot_product_attention(q_BHqD, k_BHkD, v_BHkD).transpose(1, 2)

    tensors = [x.transpose(1, 2) for x in (q_BHQD, k_BHKD, v_BHKD)]
    numbers = (torch.arange(x.shape[1]) for x in tensors[:2])
    return rule(attend, Rows(*tensors, *numbers)).transpose(1, 2)


def kept_with(numbers: torch.Tensor, key: Hashable, make: Callable[[], Kept]) -> Kept:
    """The result of `make`, such as rows by group on a device, cached on the tensor `numbers`. A rank gives a rule the same
    tensor in all layers, and in all calls that are alike."""
    kept = vars(numbers).setdefault(KEPT, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]
