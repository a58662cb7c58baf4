"""Avoids work that bands of one call would repeat: outputs that all bands share, and modules for text in bands without text.

Each band would compute the whole prologue, and read the weights of each block's modulation again. If a trial has shown that
a module returns the same for all bands, a rank computes it only in a call's first band (rank/stage/module_cache.py).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnBlock, name_pattern
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.forwards import put_forwards
from parallel_backend.own_class.cuts.token_cut import TokenCut

PLAIN = type(None), bool, int, float, str
"""Types that a shared output may consist of, in addition to tensors."""


class WatchedOutputs:
    """Watches a model's modules while bands run, and finds those that return the same in every band."""

    def __init__(self, model: nn.Module, blocks: Sequence[OwnBlock]):
        self._blocks = blocks
        self._modules = {name: module for name, module in model.named_modules() if name and not _is_cheap(module)}
        for block in blocks:
            self._modules.pop(block.name, None)
        inside = tuple(f"{block.name}." for block in blocks)
        self._idle = {name: module for name, module in self._modules.items() if name.startswith(inside)}
        self._attending: set[str] = set()  # modules around attention calls
        self._kept: dict[str, list[Any]] = {}  # of the first run, by module
        self._given: dict[str, list[Any]] = defaultdict(list)  # of the present one
        self._inside: list[str] = []  # modules that run at present, the outer ones first
        self._runs = 0
        self._rows: dict[str, set[int]] = defaultdict(set)  # of the modules' outputs in the present run

    @contextmanager
    def run(self, has_words: bool) -> Iterator[None]:
        """Context in which one band runs."""
        self._given.clear()
        self._inside.clear()
        self._rows.clear()
        with ExitStack() as hooks:
            for name, module in (self._modules | self._idle).items():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                hooks.enter_context(module.register_forward_hook(partial(self._leave, name)))
            yield
        for name in list(self._modules):
            outputs, first = self._given.get(name, []), self._kept.get(name, [])
            if not outputs or not all(map(_is_plain, outputs)) or (self._runs and not _equal(outputs, first)):
                del self._modules[name]
        for name in list(self._idle):
            if not (rows := self._rows[name]) or (min(rows) < 2 if has_words else rows != {1}):
                del self._idle[name]
        self._kept = self._kept or {name: self._given[name] for name in self._modules}
        self._runs += 1

    def attends(self, keeps: bool) -> None:
        """To be called when a block attends. Modules around that call are not shared: ranks count attention calls. They are
        not idle either if the band, which is without text, `keeps` keys of the call for other bands."""
        self._attending.update(self._inside)
        for name in self._inside:
            self._modules.pop(name, None)
            if keeps:
                self._idle.pop(name, None)

    def shared(self) -> tuple[str, ...]:
        """Return the names of the outermost modules whose outputs bands share. Empty before the second run. If all blocks of
        a list share a module, its name has a star for the block's number: see core.own_class.name_pattern."""
        if self._runs < 2:
            return ()
        return self._of_all_blocks(self._modules)

    def idle(self) -> tuple[str, ...]:
        """Names of the blocks' linear layers and modules with attention that have one row in bands without text, and more in
        others. Their attention keeps no keys in bands without text."""
        found = (name for name, each in self._idle.items() if isinstance(each, nn.Linear) or name in self._attending)
        return self._of_all_blocks(found) if self._runs > 1 else ()

    def _of_all_blocks(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names that all blocks of a list have, without modules inside of others."""
        counts = Counter(_of_list(name, self._blocks) for name in names)
        blocks = Counter(block.name.rpartition(".")[0] for block in self._blocks)
        found = [name for name, count in counts.items() if "*" not in name or count == blocks[name.partition(".*.")[0]]]
        return tuple(name for name in found if not name.startswith(tuple(f"{outer}." for outer in found)))

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave(self, name: str, _module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._inside.remove(name)
        if name in self._modules:
            self._given[name].append(pytree.tree_map_only(torch.Tensor, torch.clone, out))
        if name in self._idle:
            given = args[0] if args else None
            of_rows = torch.is_tensor(given) and torch.is_tensor(out) and given.shape[:-1] == out.shape[:-1]
            self._rows[name].add(out.shape[1] if of_rows and out.ndim == 3 else 0)


class SharedOutputs:
    """Computes these modules only in the first band of a call, and returns the same outputs in its other bands. Raises
    Unproven if the class writes into one of the outputs."""

    def __init__(self, model: nn.Module, names: Sequence[str]):
        self._kept: dict[tuple[str, int], tuple[Any, list[int]]] = {}
        self._calls: Counter[str] = Counter()
        self._modules = modules_of(model, names)

    def of_call(self) -> ExitStack:
        """Begin a call. Modules share their outputs until the stack is closed."""
        self._kept.clear()
        return put_forwards((module, partial(self._shared, name, module.forward)) for name, module in self._modules.items())

    def begin(self) -> None:
        """Begin a band: count the modules' calls from 0."""
        self._calls.clear()

    def _shared(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = name, self._calls[name]
        self._calls[name] += 1
        if key not in self._kept:
            out = forward(*args, **kwargs)
            self._kept[key] = out, _versions(out)
        out, versions = self._kept[key]
        if _versions(out) != versions:
            raise Unproven(f"its class writes into what {name} returns")
        return out


def modules_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the model's modules with these names, by name. See core.own_class.name_pattern."""
    pattern = re.compile("|".join(map(name_pattern, names)))
    return {name: module for name, module in model.named_modules() if name and pattern.fullmatch(name)}


def _is_cheap(module: nn.Module) -> bool:
    """Whether it is one of torch's modules without weights, such as an activation."""
    return type(module).__module__.startswith("torch.") and next(module.parameters(), None) is None


def _is_plain(out: Any) -> bool:
    leaves = pytree.tree_leaves(out)
    return all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves) and any(map(torch.is_tensor, leaves))


def _equal(outputs: Any, others: Any) -> bool:
    """Whether two outputs are bitwise equal."""
    (one, form), (two, other_form) = pytree.tree_flatten(outputs), pytree.tree_flatten(others)
    return form == other_form and all(
        (torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)) if torch.is_tensor(a) else a == b
        for a, b in zip(one, two, strict=True)
    )


def _of_list(name: str, blocks: Sequence[OwnBlock]) -> str:
    """Return a module's name, with a star instead of its block's number."""
    for block in blocks:
        if name.startswith(f"{block.name}."):
            return f"{block.name.rpartition('.')[0]}.*{name.removeprefix(block.name)}"
    return name


def _versions(out: Any) -> list[int]:
    return [leaf._version for leaf in pytree.tree_leaves(out) if torch.is_tensor(leaf)]


def put_idle_modules(
    model: nn.Module, names: Sequence[str], tokens: Callable[[], TokenCut | None], value: float
) -> ExitStack:
    """Have modules that only text passes skip their work in bands without text, until the stack is closed.

    In such bands one row stands in for the text, because a class cannot run without rows (band_tokens.py). The modules then
    return `value`, and neither read their weights nor attend. `names`: see core.own_class.name_pattern. `tokens`: returns
    the present call's cut of tokens."""
    made: dict[str, tuple[int, torch.dtype, int]] = {}  # by module: its outputs' features and dtype, its attention calls

    def run(name: str, forward: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        cut = tokens()
        if cut is None or not cut.runs_block:
            return forward(x, *args, **kwargs)
        if cut.has_words or name not in made:
            before, out = cut.attended, forward(x, *args, **kwargs)
            made[name] = out.shape[-1], out.dtype, cut.attended - before
            return out
        features, dtype, calls = made[name]
        cut.attended += calls
        return x.new_full((*x.shape[:-1], features), value, dtype=dtype)

    modules = modules_of(model, names).items()
    return put_forwards((module, partial(run, name, module.forward)) for name, module in modules)
