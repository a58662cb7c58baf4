"""Finds the layers of a class's block that tensor ranks can share, by gradients.

In one run of the block, outputs of layers and of attention are leaves: gradients end there. The gradient of one rank's
heads, or of its part of a layer's input, is 0 at features of earlier layers that the rank does not need. Features that only
one rank needs are cut with it, as in Megatron-LM (arXiv 1909.08053). feature_trial.py proves the cuts found here.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnCut
from parallel_backend.core.spans import Span, split_units
from parallel_backend.own_class.cuts.attention_calls import attention_by, attention_call
from parallel_backend.own_class.cuts.tensor_plan import CutKind

ARGUMENT = "argument "
"""Prefix of the leaves' names for a block's tensor arguments."""
NORMS = F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm
"""Functions that normalize without a module."""
TOGETHER = 32
"""Features that stay together if neither ranks nor heads divide a width: packed weights have groups of this size."""
Needs = dict[str, torch.Tensor]
"""Name of a leaf or norm -> bool: the needed features [width] of a layer, attention or norm, or values of an argument."""


@dataclass
class BlockRun:
    """One run of a block. Each list has an entry for each call of the module."""

    leaves: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Outputs of layers and attention, [..., width], and the block's arguments. Gradients end at them."""
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Inputs of layers that may be cut, [..., width]."""
    norms: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Outputs of norms. Each output feature is assumed to depend only on the same feature of the input."""
    unshared: set[str] = field(default_factory=set)
    """Norms whose features ranks cannot share. They can share an RMSNorm's, because they add up its sum of squares."""
    heads: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Queries, keys and values of each attention call, [B, S, H, D]."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Tensors that the block returns."""

    def leaf(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Record a copy of `value` as a leaf. Returns a tensor that the class may write into."""
        self.leaves.setdefault(name, []).append(value.detach().clone().requires_grad_())
        return self.leaves[name][-1] * 1

    def note_layer(
        self, name: str, _layer: nn.Module, given: tuple, more: dict[str, Any], out: torch.Tensor
    ) -> torch.Tensor:
        """Forward hook of a linear layer: records its input, and makes its output a leaf of autograd. Skips calls with named
        arguments."""
        if more or len(given) != 1:
            return out
        self.inputs.setdefault(name, []).append(given[0])
        return self.leaf(name, out)

    def note_norm(self, name: str, norm: nn.RMSNorm, given: tuple, out: torch.Tensor) -> torch.Tensor:
        """Forward hook of an RMSNorm: records its output."""
        return self.normed(name, given[0], out, norm.eps is not None and norm.weight is not None)

    def normed(self, name: str, x: torch.Tensor, out: torch.Tensor, shared: bool) -> torch.Tensor:
        """Record a norm's output and return it. `shared`: whether ranks can share its features, see `unshared`."""
        if not shared:
            self.unshared.add(name)
        self.norms.setdefault(name, []).append(out.detach() + (x - x.detach()))
        return self.norms[name][-1] * 1

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces ComfyUI's attention function: records the heads, and makes the output a leaf of autograd."""
        call, name = attention_call(function, *args, **kwargs), f"attention {len(self.heads)}"
        self.heads[name] = call.q_BQHD, call.k_BKHD, call.v_BKHD
        with torch.no_grad():
            out = function(*args, **kwargs)
        if not call.heads_first:
            return self.leaf(name, out)
        return self.leaf(name, out.transpose(1, 2).flatten(2)).unflatten(-1, (call.q_BQHD.shape[2], -1)).transpose(1, 2)

    def needs(self, values: Iterable[torch.Tensor]) -> Needs:
        """Return the features that these values depend on. Leaves and norms without any are left out."""
        values = [each for each in values if each.requires_grad]
        named = [(name, each) for noted in (self.leaves, self.norms) for name, calls in noted.items() for each in calls]
        if not values:
            return {}
        g = torch.Generator().manual_seed(0)
        weights = [torch.randn(each.shape, generator=g) for each in values]
        tensors = [each for _, each in named]
        grads = torch.autograd.grad(values, tensors, weights, retain_graph=True, allow_unused=True)
        found: Needs = {}
        for (name, _), grad in zip(named, grads, strict=True):
            if grad is None or not (needed := grad != 0).any():
                continue
            if not name.startswith(ARGUMENT):
                needed = needed.flatten(0, -2).any(0)
            if name in self.heads:  # of attention whole heads, of which a class may drop some channels
                values = self.heads[name][2]
                needed = needed.view(values.shape[2], -1).any(1).repeat_interleave(values.shape[3])
            found[name] = found[name] | needed if name in found else needed
        return found


class Opaque(TorchFunctionMode):
    """Handles norms outside of modules, and operations without a gradient, such as rotary embedding kernels. The latter's
    outputs are assumed to depend on the whole last axis of each input of the same shape."""

    def __init__(self, run: BlockRun):
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NORMS:
            out = func(*args, **(kwargs or {}))
            return self._run.normed(f"norm {len(self._run.norms)}", args[0], out, False)
        if not isinstance(func, OpOverload | OpOverloadPacket) or str(func).startswith("aten"):
            return func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        # Some write into their inputs, which refuses a gradient, and which autograd may not see.
        values = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.data, (args, kwargs or {}))
        with torch.no_grad():
            out = func(*values[0], **values[1])

        def tied(value: torch.Tensor) -> torch.Tensor:
            like = [each for each in given if each.shape == value.shape and each.requires_grad]
            return functools.reduce(lambda all_of, x: all_of + (x - x.detach()).sum(-1, keepdim=True), like, value)

        return pytree.tree_map_only(torch.Tensor, tied, out)


@contextmanager
def _gradients(run: BlockRun) -> Iterator[None]:
    """Context of a run with gradients. Saved tensors are copied, because blocks write into them."""
    with warnings.catch_warnings():  # torch warns where code reads a single value
        warnings.simplefilter("ignore")
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved), Opaque(run):
            yield


def run_noted(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockRun:
    """Run a block with these arguments and record the run. Raises the block's own errors."""
    run = BlockRun()
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    with ExitStack() as hooks, _gradients(run), attention_by(run.attend):
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                hook = functools.partial(run.note_layer, name)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            elif isinstance(module, nn.RMSNorm):
                hooks.enter_context(module.register_forward_hook(functools.partial(run.note_norm, name)))
        for at, each in enumerate(leaves):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                leaves[at] = run.leaf(f"{ARGUMENT}{at}", each)
        given, named = pytree.tree_unflatten(leaves, structure)
        out = nn.Module.__call__(block, *given, **named)  # the arguments are noted behind an adapter's `__call__`
    run.outputs = [each for each in pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]
    return run


@dataclass(frozen=True)
class Place:
    """A point at which each rank may have a part: the heads of an attention call, or a layer's input."""

    sizes: tuple[int, ...]
    """Sizes of the parts of the layer's input, see OwnCut. Empty for heads."""
    units: tuple[int, ...]
    """Number of units of each part, see OwnCut. Empty for heads."""
    needs: tuple[Needs, ...]
    """The features that each rank needs for its part."""

    def cut(self) -> dict[str, torch.Tensor] | None:
        """Return name of a leaf or norm that can be cut -> features of each rank, bool [ranks, width]; no two ranks need the
        same one. None: ranks share some features, but not all, or need parts of an argument along an axis that is not its
        heads."""
        found = {}
        for name in dict.fromkeys(name for needs in self.needs for name in needs):
            masks = [needs.get(name) for needs in self.needs]
            present = [mask for mask in masks if mask is not None]
            if len(present) == len(masks) and all(torch.equal(mask, present[0]) for mask in present):
                continue
            if (
                name.startswith(ARGUMENT)
                and not self.sizes
                and len(present) == len(masks)
                and has_heads(torch.stack(present))
            ):
                continue
            if len(present) < len(masks) or name.startswith(ARGUMENT) or bool(torch.any(torch.stack(present).sum(0) > 1)):
                return None
            found[name] = torch.stack(present)
        return found


def parts_of(features: torch.Tensor) -> list[tuple[int, int]] | None:
    """Return (size, units) of each part of the features, in order, as OwnCut splits them. `features`: bool [ranks, width],
    those that each rank has. None: OwnCut cannot describe this split."""
    if not bool((features.sum(0) == 1).all()):
        return None
    size = len(features)
    ranks, counts = torch.unique_consecutive(features.int().argmax(0), return_counts=True)
    if ranks.tolist() != list(range(size)) * (len(ranks) // size):
        return None
    parts = []
    for shares in counts.view(-1, size).tolist():
        units, rest = divmod(total := sum(shares), max(shares) - min(shares) or 1)
        if rest or shares != list(map(len, split_units(Span(0, total), size, units))):
            return None
        parts.append((total, units))
    return parts


def has_heads(needed: torch.Tensor) -> bool:
    """Whether some axis of an argument is split over the ranks. `needed`: bool [ranks, *shape]."""
    by_axis = (needed.movedim(axis, 1).flatten(2).any(2) for axis in range(1, needed.ndim - 1))
    return any(len(parts_of(features) or ()) == 1 for features in by_axis)


def units_of_heads(run: BlockRun, ranks: int) -> list[int]:
    """Numbers of units to try when `ranks` split a block's heads: equal shares first, then as many units as possible, then
    fewer, because several heads may share keys. Empty: there are fewer heads than ranks."""
    heads = math.gcd(*(tensors[0].shape[2] for tensors in run.heads.values()))
    even = [ranks] if heads % ranks == 0 else []
    return even + [units for units in range(heads, ranks, -1) if heads % units == 0 and units % ranks]


@torch.enable_grad()
def layers_to_cut(run: BlockRun, ranks: int, choices: Sequence[int]) -> tuple[list[OwnCut], int]:
    """Return the layers of a block that `ranks` ranks can share, and the number of units of its heads, one of `choices`. If
    no layer has kind ROW, neither heads nor features can be cut."""
    places: dict[str, Place] = {}
    of_heads = choices[0]
    for units in choices:
        found_places = {name: place for name in run.heads if (place := _of_heads(run, name, ranks, units))}
        if len(found_places) > len(places):
            places, of_heads = found_places, units
        if len(places) == len(run.heads):
            break
    widths = [run.leaves[name][0].shape[-1] for name in run.heads]
    for name in run.inputs:
        if (place := _of_input(run, name, ranks, of_heads, widths)) is not None:
            places[name] = place
    while True:
        cuts = {name: place.cut() or {} for name, place in places.items()}
        whole = set(run.needs(_whole_values(run, places)))
        whole |= {
            leaf for name, place in places.items() for needs in place.needs for leaf in needs if leaf not in cuts[name]
        }
        whole |= {name for name in run.heads if name not in places} | run.unshared
        features: dict[str, torch.Tensor] = {}
        for cut in cuts.values():
            for leaf, masks in cut.items():
                features[leaf] = features[leaf] | masks if leaf in features else masks
        parts = {leaf: None if leaf in whole else parts_of(masks) for leaf, masks in features.items()}
        wrong = {leaf for leaf, sizes in parts.items() if sizes is None}
        dropped = {name for name, cut in cuts.items() if wrong & cut.keys()}
        dropped |= {name for name in places if name in run.heads and (name in wrong or name not in parts)}
        dropped = dropped or _dropped_of_sums(run, cuts)
        if not dropped:
            break
        places = {name: place for name, place in places.items() if name not in dropped}
    found = [_cut(name, CutKind.ROW, place.sizes, place.units) for name, place in places.items() if place.sizes]
    for name, shared in parts.items():
        if shared and (name in run.inputs or name in run.norms):
            kind = CutKind.COLUMN if name in run.inputs else CutKind.NORM
            found.append(_cut(name, kind, tuple(size for size, _ in shared), tuple(count for _, count in shared)))
    known = {cut.layer for cut in found}
    for name in run.inputs:
        width = run.leaves[name][0].shape[-1]
        if name not in known and (count := _units_of(width, ranks, of_heads)):
            found.append(_cut(name, CutKind.GATHER, (width,), (count,)))
    return found, of_heads


def _cut(layer: str, kind: CutKind, sizes: tuple[int, ...], units: tuple[int, ...]) -> OwnCut:
    return OwnCut(layer, kind.value, sizes, () if units == sizes else units)


def _units_of(size: int, ranks: int, of_heads: int, goes_with_heads: bool = False) -> int:
    """Return the number of units that `size` features are split in, see OwnCut. Ranks get even shares or whole heads. 0:
    ranks cannot share the features."""
    if of_heads % ranks and size % of_heads == 0 and (goes_with_heads or size % ranks):
        return of_heads
    if size % ranks == 0:
        return size
    return size // TOGETHER if size % TOGETHER == 0 and size // TOGETHER >= ranks else 0


def _dropped_of_sums(run: BlockRun, cuts: Mapping[str, Mapping[str, torch.Tensor]]) -> set[str]:
    """Places to drop because a layer cannot have both its input and its output cut. Cuts of heads are kept if possible."""
    of_heads = {name for name in cuts if name in run.inputs for heads in run.heads if name in cuts.get(heads, {})}
    return of_heads or {name for name, cut in cuts.items() if any(leaf in cuts and leaf in run.inputs for leaf in cut)}


def _whole_values(run: BlockRun, places: Mapping[str, Place]) -> list[torch.Tensor]:
    """Return the values that every rank needs in full."""
    found = list(run.outputs)
    for name, tensors in (run.heads | run.inputs).items():
        if name not in places:
            found += tensors
    return found


def _of_heads(run: BlockRun, name: str, ranks: int, units: int) -> Place | None:
    """Return the heads of an attention call, split into this number of units. None: ranks cannot share them."""
    tensors = run.heads[name]
    spans = split_units(Span(0, tensors[0].shape[2]), ranks, units)
    of_each = (Place((), (), tuple(run.needs([x[:, :, span.slice]]) for span in spans)) for x in tensors)
    if not all(place.cut() for place in of_each):
        return None
    place = Place((), (), tuple(run.needs(x[:, :, span.slice] for x in tensors) for span in spans))
    return place if place.cut() else None


def _of_input(run: BlockRun, name: str, ranks: int, of_heads: int, widths: Sequence[int]) -> Place | None:
    """Return how a layer's input is cut: as one part, or as two parts, of which one has the width of attention's output.
    None: it cannot be cut."""
    total = run.inputs[name][0].shape[-1]
    choices = [
        (total,),
        *(pair for width in widths if width < total for pair in ((width, total - width), (total - width, width))),
    ]
    for sizes in dict.fromkeys(choices):
        units = tuple(_units_of(size, ranks, of_heads, size in widths) for size in sizes)
        if not all(units):
            continue
        needs: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        start = 0
        for size, count in zip(sizes, units, strict=True):
            for rank, span in enumerate(split_units(Span(start, start + size), ranks, count)):
                needs[rank] += [x[..., span.slice] for x in run.inputs[name]]
            start += size
        place = Place(sizes, units, tuple(map(run.needs, needs)))
        if place.cut():
            return place
    return None
