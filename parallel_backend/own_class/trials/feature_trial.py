"""Tries whether tensor ranks, each with its part of a class's layers, compute what the uncut model does.

The uncut run records the outputs of its layers. Then ranks run one after the other in one process. At a layer whose outputs
are summed or gathered, a rank continues with the recorded values. The ranks' own values must add up to them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnBlock, OwnCut
from parallel_backend.own_class.calls.tried_calls import Call, copied
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.feature_cut import layers_to_cut, run_noted, units_of_heads
from parallel_backend.own_class.cuts.forwards import put_forward
from parallel_backend.own_class.cuts.tensor_plan import CutKind, axes_of_heads, cut_side, divide, shard_of
from parallel_backend.own_class.plans.block_order import Representatives, blocks_of_all, list_of
from parallel_backend.own_class.trials.comparison import TensorRank, as_unproven, check_equal, close, why_not

MOST_SETTINGS = 64
"""Maximum number of combinations of attributes and arguments that are tried for a block."""

LAYERS = nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d
"""Layers whose attributes follow from the sizes of their weights."""

Run = Callable[[TensorRank], Any]
"""Runs the module as this tensor rank and returns its result. With a single rank the module is uncut."""
GUIDANCE = "guided attention"


class _Values:
    """The values of one layer (or norm) in the uncut run, in order, and the sums of the ranks' values. `name`: the layer's
    name in messages. Raises Unproven if a rank's values do not fit."""

    def __init__(self, name: str):
        self.name, self._next = name, 0
        self._whole: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def begin(self) -> None:
        """Begin the run of a rank."""
        self._next = 0

    def note(self, value: torch.Tensor) -> torch.Tensor:
        """Record the next value of the uncut run, and return it."""
        self._whole.append(value.clone())
        return value

    def next(self) -> torch.Tensor:
        """Return the recorded value of the uncut run at the point that the rank has reached."""
        self._next += 1
        if self._next > len(self._whole):
            raise Unproven(f"{self.name} is called more often if it is cut")
        return self._whole[self._next - 1]

    def add(self, own: torch.Tensor) -> torch.Tensor:
        """Add the rank's value to the sums. Returns the uncut run's value."""
        whole = self.next()
        if own.shape != whole.shape:
            raise Unproven(f"a rank's values of {self.name} have a different shape from the whole model's")
        if self._next > len(self._sums):
            self._sums.append(torch.zeros_like(whole))
        self._sums[self._next - 1] += own
        return whole.clone()

    def check_sums(self) -> None:
        """Raise Unproven if the ranks' values do not add up to the uncut run's."""
        if len(self._whole) != len(self._sums) or not all(map(close, self._sums, self._whole)):
            raise Unproven(f"the ranks' values of {self.name} do not add up to the whole model's")


class _LayerOfRank:
    """A layer with a tensor rank's part of the weights. `values`: those of the uncut run."""

    def __init__(self, cut: OwnCut, layer: nn.Module, rank: TensorRank, values: _Values):
        self._cut, self._layer, self._rank, self._values = cut, layer, rank, values

    def put(self, stack: ExitStack) -> None:
        """Give the layer the rank's part of its weights until the stack is closed."""
        kept = dict(self._layer._parameters)
        stack.callback(self._layer._parameters.update, kept)
        shards = {name: self._shard(name, parameter) for name, parameter in kept.items() if parameter is not None}
        self._layer._parameters.update(shards)
        if self._cut.kind == CutKind.NORM.value:
            stack.callback(put_forward(self._layer, self._norm))
        elif self._cut.kind != CutKind.COLUMN.value:
            stack.enter_context(self._layer.register_forward_hook(self._made_up))

    def _part(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        spans = cut_side(self._cut, x.shape[dim], self._rank.index, self._rank.count)
        parts = [x.narrow(dim, span.start, len(span)) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _shard(self, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        shard = shard_of(self._cut, name, parameter.shape, self._rank.index, self._rank.count)
        if shard is None or not shard.spans:
            return None if shard else parameter
        return nn.Parameter(self._part(parameter, shard.dim), requires_grad=False)

    def _whole_of(self, own: torch.Tensor) -> torch.Tensor:
        """Return the uncut run's value. Raises Unproven if the rank's own value is not a part of it."""
        whole = self._values.next()
        if not close(own, self._part(whole), whole):
            raise Unproven(f"a rank's values of {self._values.name} are not a part of the whole model's")
        return whole

    def _made_up(self, _layer: nn.Module, _given: tuple, out: torch.Tensor) -> torch.Tensor:
        """Forward hook of a layer whose outputs are summed or gathered: replaces them with the uncut run's."""
        return self._whole_of(out).clone() if self._cut.kind == CutKind.GATHER.value else self._values.add(out)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """Forward of an RMSNorm over the rank's features. The mean square is that of all features."""
        whole, norm = self._whole_of(x), self._layer
        assert isinstance(norm, nn.RMSNorm) and norm.eps is not None
        return x * torch.rsqrt(whole.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def _layers(module: nn.Module, blocks: Sequence[OwnBlock]) -> Iterator[tuple[str, OwnCut, nn.Module]]:
    """Yield (name, cut, layer) of each layer in the module's `blocks` that tensor parallelism cuts."""
    for block in blocks:
        for cut in block.cuts:
            name = f"{block.name}.{cut.layer}".removeprefix(".")
            yield name, cut, module.get_submodule(name)


@contextmanager
def _of_rank(
    module: nn.Module, blocks: Sequence[OwnBlock], rank: TensorRank, values: Mapping[str, _Values]
) -> Iterator[None]:
    """Context in which the module has this rank's part of its layers. `values`: by name of the layer."""
    with ExitStack() as stack:
        for name, cut, layer in _layers(module, blocks):
            _LayerOfRank(cut, layer, rank, values[name]).put(stack)
        for block in blocks:
            stack.enter_context(divide(module.get_submodule(block.name), block, rank.index, rank.count))
        yield


@contextmanager
def _noting(module: nn.Module, blocks: Sequence[OwnBlock], values: Mapping[str, _Values]) -> Iterator[None]:
    """Context of the uncut run, in which the values of the cut layers are recorded."""

    def note(name: str, cut: OwnCut, _layer: nn.Module, given: tuple, out: torch.Tensor) -> None:
        values[name].note(given[0] if cut.kind == CutKind.NORM.value else out)

    with ExitStack() as hooks:
        for name, cut, layer in _layers(module, blocks):
            hooks.enter_context(layer.register_forward_hook(partial(note, name, cut)))
        yield


def check_shared(module: nn.Module, blocks: Sequence[OwnBlock], run: Run, ranks: int) -> None:
    """Raise Unproven if ranks that share these blocks' layers do not compute what the module does in `run`. A block with an
    empty name is the module itself."""
    kinds = {name: cut.kind for name, cut, _ in _layers(module, blocks)}
    values = {name: _Values(name) for name in (*kinds, GUIDANCE)}
    with as_unproven("it does not run if its layers are cut"):
        with _noting(module, blocks, values):
            whole = run(TensorRank(0, 1, values[GUIDANCE].note))
        for index in range(ranks):
            rank = TensorRank(index, ranks, values[GUIDANCE].add)
            for each in values.values():
                each.begin()
            with _of_rank(module, blocks, rank, values):
                out = run(rank)
            for both in zip(_tensors(out), _tensors(whole), strict=True):
                check_equal("ranks that share its layers give a different result", *both)
        for name in (*(name for name, kind in kinds.items() if kind == CutKind.ROW.value), GUIDANCE):
            values[name].check_sums()


def _tensors(out: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]


class TensorSharing:
    """Finds, with the first of `calls`, how `ranks` tensor ranks can share the layers of a tried model's blocks. Raises
    Unproven if they cannot share them, or if one of the calls gives a wrong result."""

    def __init__(self, model: nn.Module, blocks: Sequence[OwnBlock], calls: Sequence[Call], ranks: int):
        self._model, self._ranks = model, ranks
        given = _arguments(model, blocks, calls[0])
        self._shared = [_with_shares(model.get_submodule(block.name), block, given[block.name], ranks) for block in blocks]
        for call in calls:
            self.check_call(call)

    def check_call(self, call: Call) -> None:
        """Like `check`, for a run of this call with all tokens in one stage."""
        self.check(lambda _rank: call.run(self._model, options=False))

    def check(self, run: Run) -> None:
        """Raise Unproven if tensor ranks give a different result in this run, such as one with a part of the tokens."""
        check_shared(self._model, self._shared, run, self._ranks)

    def check_all(self, runs: Iterable[Run]) -> None:
        """Like `check`, for each of these runs."""
        for run in runs:
            self.check(run)

    def of_all(self, blocks: tuple[OwnBlock, ...], like: Representatives) -> tuple[OwnBlock, ...]:
        """Return all `blocks` of the class, with the cuts found for the tried blocks."""
        lists = {at: [block.name for block in blocks if list_of(block) == at] for at in like}
        shared_by = {block.name: block for block in blocks_of_all(self._shared, lists, like)}
        fields = "cuts", "divided", "headed", "units", "head_units"
        return tuple(replace(each, **{name: getattr(shared_by[each.name], name) for name in fields}) for each in blocks)


def _arguments(model: nn.Module, blocks: Sequence[OwnBlock], call: Call) -> dict[str, tuple[tuple, dict[str, Any]]]:
    """Return name of a block -> the arguments that it gets in the call."""
    found: dict[str, tuple[tuple, dict[str, Any]]] = {}

    def note(name: str, _block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        found[name] = copied((args, kwargs))

    with ExitStack() as hooks:
        for name in (block.name for block in blocks):
            hook = model.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True)
            hooks.enter_context(hook)
        call.run(model, options=False)
    return found


def _with_shares(module: nn.Module, block: OwnBlock, given: tuple[tuple, dict[str, Any]], ranks: int) -> OwnBlock:
    """The block with the layers that ranks can share, if it gets these arguments. Raises Unproven if they can share none."""
    with as_unproven(f"the inputs of the layers of {block.name} cannot be found"):
        noted = run_noted(module, *given)
        choices = units_of_heads(noted, ranks)
        cuts, of_heads = layers_to_cut(noted, ranks, choices) if choices else ([], 0)
    heads, head_sizes = ({tensors[0].shape[axis] for tensors in noted.heads.values()} for axis in (2, 3))
    if not choices:
        raise Unproven(f"its {min(heads)} heads cannot be shared by {ranks} ranks (in {block.name})")
    if not any(cut.kind == CutKind.ROW.value for cut in cuts):
        raise Unproven(f"neither its heads nor its features can be shared by {ranks} ranks (in {block.name})")
    amounts = _amounts(cuts, head_sizes, ranks)
    head_units = of_heads if of_heads % ranks else 0
    failures = []

    def run(_rank: TensorRank) -> Any:
        args, kwargs = copied(given)
        return nn.Module.__call__(module, *args, **kwargs)

    for places, headed in itertools.islice(_settings(module, amounts, axes_of_heads(*given, heads)), MOST_SETTINGS):
        divided, units = tuple(place[:2] for place in places), tuple(place[2] for place in places)
        units = units if any(units) else ()
        shared = replace(block, cuts=tuple(cuts), divided=divided, units=units, headed=headed, head_units=head_units)
        if not (why := why_not(partial(check_shared, module, [replace(shared, name="")], run, ranks))):
            return shared
        failures.append(why)
    raise Unproven(f"{failures[0]} (in {block.name})")


def _amounts(cuts: Sequence[OwnCut], head_sizes: set[int], ranks: int) -> dict[int, int]:
    """Return numbers that may have to be divided over ranks -> their units, see OwnBlock.

    They are numbers of features (of one part of a cut layer's side, or of consecutive parts) and numbers of heads. If two
    parts have the same size, the one with fewer units counts.
    """
    parts: set[tuple[int, int]] = set()
    for cut in cuts:
        if cut.kind == CutKind.GATHER.value:
            continue
        in_units = cut.units or cut.sizes
        for start, stop in itertools.combinations(range(len(cut.sizes) + 1), 2):
            sizes, counts = cut.sizes[start:stop], in_units[start:stop]
            if sizes == counts and not any(size % ranks for size in sizes):
                parts.add((sum(sizes), sum(sizes)))
            elif len(set(counts)) == 1:
                parts.add((sum(sizes), counts[0]))
    found: dict[int, int] = {}
    for size, units in sorted(parts, key=lambda part: part[1]):
        found.setdefault(size, 0 if size == units else units)
        for heads in (size // each for each in head_sizes if size % each == 0):
            if heads % (ranks if size == units else units) == 0:
                found.setdefault(heads, 0 if units in (size, heads) else units)
    return found


def _settings(
    block: nn.Module, amounts: Mapping[int, int], tables: Mapping[int, Sequence[tuple[int, int]]]
) -> Iterator[tuple[tuple[tuple[str, str, int], ...], tuple[tuple[int, int], ...]]]:
    """Yield combinations of attributes and arguments whose values are divided by the number of ranks, in the order in which
    they are tried.

    The first one has all attributes whose value is in `amounts`, and none of the `tables`. The next ones have one attribute
    less or one axis of tables more, and so on.
    """
    by_name: dict[tuple[str, int], list[tuple[str, str, int]]] = {}
    for path, module in block.named_modules():
        if not isinstance(module, LAYERS):
            for attribute, value in vars(module).items():
                if type(value) is int and value in amounts:
                    by_name.setdefault((attribute, value), []).append((path, attribute, amounts[value]))
    for changes in range(len(by_name) + len(tables) + 1):
        for taken in range(max(0, changes - len(by_name)), min(changes, len(tables)) + 1):
            attributes = itertools.combinations(by_name, len(by_name) - changes + taken)
            for names, axes in itertools.product(attributes, itertools.combinations(tables, taken)):
                headed = tuple(place for axis in axes for place in tables[axis])
                yield tuple(place for name in names for place in by_name[name]), headed
