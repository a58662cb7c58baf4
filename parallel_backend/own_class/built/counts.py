"""Counts a call's tokens and its operations by block. It runs on the meta device, so no values are computed."""

import functools
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.block_arguments import tensor_places, token_count
from parallel_backend.own_class.calls.call_arguments import LATENT, LATENTS, STRUCTURE, TIMES, from_tensors, timestep_of
from parallel_backend.own_class.calls.tried_calls import Call, entry_of
from parallel_backend.own_class.cuts.attention_calls import AttentionCall, Rows, attention_by, attention_call
from parallel_backend.own_class.cuts.guided_attention import SECOND
from parallel_backend.own_class.cuts.stages import pass_through

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """Operations of one block. A multiplication and an addition count as two."""

    layers: int = 0
    """Operations of everything except attention, and of attention whose keys are complete on every rank."""
    attention: int = 0
    """Operations of attention between tokens that ranks split. They grow with the square of the number of tokens."""


@dataclass(frozen=True)
class Counts:
    """Counts of a call with one batch entry."""

    states: int
    """Number of elements of the largest hidden states that a block returns."""
    streams: Mapping[int, int]
    """Stream -> its number of tokens. Empty if no trial has cut tokens."""
    blocks: tuple[Work, ...]
    """Work of each block, in the order of a call."""
    outside: int
    """Operations outside of blocks. Every stage and every sequence rank computes them."""

    @property
    def shared(self) -> float:
        """Fraction of all operations that are in blocks."""
        inside = sum(work.layers + work.attention for work in self.blocks)
        return inside / max(1, inside + self.outside)


def counts_of(own: OwnClass, tensors: Mapping[str, torch.Tensor]) -> Counts | None:
    """Return the counts of a call with these conditioning tensors (`to_tensors`). None: no trial was made, or `counted`
    returns None."""
    if not own.blocks or STRUCTURE not in tensors:
        return None
    shapes = ((name, tuple(each.shape[1:]), each.dtype) for name, each in tensors.items() if name != STRUCTURE)
    asked = own, bytes(tensors[STRUCTURE][0].tolist()), tuple(shapes)
    if (counts := _counts_of(*asked)) is not None:
        return counts
    whole = ((name, each) for name, each in tensors.items() if name != STRUCTURE and _is_whole(each))
    numbers = tuple((name, each[0].cpu().contiguous().numpy().tobytes()) for name, each in whole)
    return _counts_of(*asked, numbers) if numbers else None


@functools.lru_cache(maxsize=64)
def _counts_of(
    own: OwnClass,
    text: bytes,
    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype], ...],
    numbers: tuple[tuple[str, bytes], ...] = (),
) -> Counts | None:
    """Return the counts as `counts_of` does, from hashable values that a cache can use as a key. `numbers`: name and bytes
    of the first entry of each integer tensor."""
    structure = json.loads(text)
    tensors = {name: torch.empty(1, *shape, dtype=dtype, device="meta") for name, shape, dtype in shapes}
    for name, values in numbers:
        like = tensors[name]
        tensors[name] = torch.frombuffer(bytearray(values), dtype=like.dtype).view(like.shape)
    named = {name: value for name, value in from_tensors(tensors, structure).items() if name != SECOND}
    if not (LATENTS in named or structure[LATENT]):
        return None
    values = sum(math.prod(shape) for shape in named.get(LATENTS, ()))
    axes = 5 if own.video else 4
    shape = (*(1,) * (axes - 1), values) if LATENTS in named else (1, *structure[LATENT])
    of_latents = named.get(TIMES)
    sizes = (sum(map(math.prod, of_latents)),) if isinstance(of_latents, list) else ()
    times = timestep_of(torch.empty(1, *sizes, device="meta"), structure)
    return counted(own, Call(torch.empty(shape, device="meta"), times, named))


def counted(own: OwnClass, call: Call) -> Counts | None:
    """Return the counts of the call's first batch entry, from a run with meta tensors. If the class fails without values, it
    runs again with the values of integer tensors in host memory, such as types of text tokens. None: it fails then too."""
    tensors = pytree.tree_leaves(dict(call.named))
    has_numbers = any(isinstance(each, torch.Tensor) and _is_whole(each) and not each.is_meta for each in tensors)
    with _LOCK:
        for with_numbers in (False, True)[: 1 + has_numbers]:
            try:
                return _Counting(own, call, with_numbers).counts
            except Exception as error:  # of any kind: its code is not known, and may look at values
                log.debug("Parallel DiT: %s does not run without values: %s", own.name, error)
    return None


MISFITS = (
    *("cannot be multiplied", "same reduction dim", "normalized_shape", "Invalid channel dimensions"),
    "tensor of 0 elements",
)
"""Parts of torch's messages for a tensor that does not fit a layer, or is empty."""


def misfit(own: OwnClass, call: Call) -> str:
    """Return the error of a layer that a tensor of the call does not fit, such as the text of another encoder. Empty: all
    tensors fit, or the class does not run without values."""
    try:
        with _LOCK:
            _Counting(own, call, with_numbers=True)
    except Exception as error:  # of any kind: its code is not known, and may look at values
        said = str(error)
        return said if any(each in said for each in MISFITS) else ""
    return ""


_LOCK = threading.Lock()
"""Bands call this on several threads, and share the counted models."""


SELECTS = torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default
"""Operations that select elements by indices or masks."""


def _of_all_true(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the indices, with each mask replaced by integer indices, as if the mask were true everywhere."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            found += [index.new_empty(index.numel(), dtype=torch.long)] * index.ndim
        else:
            found.append(index)
    return found


class _AnyNumbers(TorchDispatchMode):
    """Gives a class values that it reads from tensors without values: floats, such as timesteps, are 0.5, bools are true.

    Reading an integer raises an error, because it may be a size. Integers that are only compared, such as each token's
    expert, count as 0."""

    def __init__(self) -> None:
        super().__init__()
        self._masks = WeakTensorKeyDictionary()  # of whole numbers that are equal to one -> whether it is 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype == torch.bool:
                return True
            if args[0].is_floating_point():
                return 0.5
        if func is torch.ops.aten.index.Tensor and (mask := args[1][0]) is not None and mask in self._masks:
            return args[0].new_empty((self._masks[mask] * mask.numel(), *args[0].shape[mask.ndim :]))
        if func in SELECTS and args[0].is_meta:
            args = args[0], _of_all_true(args[1]), *args[2:]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.eq.Scalar and _is_whole(args[0]):
            self._masks[out] = args[1] == 0
        return out


class _Counting:
    """Counts one call. Only one block of each kind runs; others return their arguments."""

    def __init__(self, own: OwnClass, call: Call, with_numbers: bool):
        self._block: OwnBlock | None = None  # the one that runs
        self._attended = 0  # its calls of attention
        self._outside, self._inside, self._states = 0, 0, 0  # operations outside of blocks, the counter's inside
        self._found: dict[str, Work] = {}
        self._streams: dict[int, int] = {}
        model, kinds = _on_meta(own)
        one = entry_of(call, 0)
        named = pytree.tree_map_only(
            torch.Tensor, lambda each: each if with_numbers and _is_whole(each) else _without_values(each), dict(one.named)
        )
        one = replace(one, x=_without_values(one.x), timestep=_without_values(one.timestep), named=named, options={})
        skipped = [block for block in own.blocks if kinds[block.name] != block.name]
        with (
            ExitStack() as hooks,
            torch.inference_mode(False),
            torch.no_grad(),
            pass_through(model, skipped),
            FlopCounterMode(display=False) as self._flops,
            _AnyNumbers(),
            attention_by(self._attend),
        ):
            for block in (block for block in own.blocks if kinds[block.name] == block.name):
                module = model.get_submodule(block.name)
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, block), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(self._leave, block)))
            one.run(model, options=False)
        self._outside += self._flops.get_total_flops() - self._inside
        works = tuple(self._found[kinds[block.name]] for block in own.blocks)
        self.counts = Counts(self._states, dict(self._streams), works, self._outside)

    def _enter(self, block: OwnBlock, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block, self._attended, self._before = block, 0, self._flops.get_total_flops()
        self._found[block.name] = Work()
        leaves = pytree.tree_leaves((args, kwargs))
        places = tensor_places(leaves)
        for cut in block.slices:
            if cut.enters and cut.streams[0] not in self._streams:
                self._streams[cut.streams[0]] = token_count(leaves[places[cut.tensor]].shape, cut)

    def _leave(self, block: OwnBlock, _module: nn.Module, _args: Any, out: Any) -> None:
        values = (out,) if isinstance(out, torch.Tensor) else out
        self._states = max(self._states, sum(each.numel() for each in values if each is not None))
        work, counted = self._found[block.name], self._flops.get_total_flops() - self._before
        self._found[block.name] = replace(work, layers=work.layers + counted)
        self._inside += counted
        self._block = None

    def _attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        call = attention_call(function, *args, **kwargs)
        queries, keys = call.q_BQHD, call.k_BKHD
        operations = _operations(call)
        block = self._block
        if block is None:
            self._outside += operations
        else:
            specs, work = block.attention, self._found[block.name]
            among = bool(specs[self._attended].keys) if specs else keys.shape[1] == queries.shape[1]
            self._attended += 1
            part = {"attention": work.attention + operations} if among else {"layers": work.layers + operations}
            self._found[block.name] = replace(work, **part)
        return call.result(queries.new_empty(*queries.shape[:3], call.v_BKHD.shape[3]))


def _operations(call: AttentionCall) -> int:
    """Return the operations of attention: two products for each query and each key that it attends to."""
    found: list[int] = []

    def attend(q_BqHD: torch.Tensor, k_BkHD: torch.Tensor, v_BkHD: torch.Tensor) -> torch.Tensor:
        found.append(4 * q_BqHD.numel() * k_BkHD.shape[1])
        return q_BqHD.new_empty(*q_BqHD.shape[:3], v_BkHD.shape[3])

    tensors = call.q_BQHD, call.k_BKHD, call.v_BKHD
    if call.rule is None:
        attend(*tensors)
    else:
        call.rule(attend, Rows(*tensors, *(torch.arange(x.shape[1]) for x in tensors[:2])))
    return sum(found)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor has integers."""
    return tensor.dtype in (torch.int32, torch.int64) and tensor.numel() > 0


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


@functools.lru_cache(maxsize=4)
def _on_meta(own: OwnClass) -> tuple[nn.Module, dict[str, str]]:
    """Return (the model with all tensors on the meta device, name of a block -> name of the first block of its kind)."""
    model = build(own)
    first: dict[tuple[Any, ...], str] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to("meta")
        vars(module).update({name: each.to("meta") for name, each in vars(module).items() if isinstance(each, torch.Tensor)})
    kinds = {}
    for block in own.blocks:
        shapes = tuple((name, tuple(each.shape)) for name, each in model.get_submodule(block.name).named_parameters())
        kinds[block.name] = first.setdefault((block.name.rpartition(".")[0], replace(block, name=""), shapes), block.name)
    return model, kinds
