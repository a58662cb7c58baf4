"""Applies a family's tensor plan: which linear layers of a block are cut, along which side, and how.

As in Megatron-LM (arXiv 1909.08053), attention and feed-forward begin with column-cut layers (each rank has some output
features) and end with row-cut layers (each rank has some input features, and partial results are added up over the axis).
Layers that make modulation vectors are column-cut and their small output is gathered, so that every large weight is cut.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from parallel_backend.core.spans import Shard, Span, split
from parallel_backend.families.base.tensor_plan import GATHER, CutKind, LayerCut, LayerCuts, cut_of, cut_outside, cut_side
from parallel_backend.rank.comm.collectives import all_reduce, start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic


@dataclass(frozen=True)
class TensorPlan:
    """A family's plan for one rank of the tensor axis."""

    plan: LayerCuts
    heads: int
    """Attention heads of the model."""
    head_size: int
    axis: Axis
    outside: frozenset[str] = frozenset()
    """Linear layers outside of the plan's lists that are cut by GATHER, see `with_outside`."""

    def with_outside(self, model: nn.Module) -> "TensorPlan":
        """The plan for `model`, whose large linear layers outside of the blocks are cut too (base/tensor_plan.py)."""
        layers = ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)
        cut = (name for name, layer in layers if cut_outside(self.plan, name, tuple(layer.weight.shape)))
        return replace(self, outside=frozenset(cut))

    def layer_cut(self, parameter: str) -> LayerCut | None:
        """Cut of the layer of `parameter` (`<list>.<index>.<layer>.weight`). None: every rank has the whole layer."""
        if self.axis.size == 1:
            return None
        return GATHER if parameter.rpartition(".")[0] in self.outside else cut_of(self.plan, parameter)

    def shards(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shard]:
        """This rank's shard of every parameter in `shapes` that is cut. The rank has the others whole."""
        shards = {}
        for parameter, shape in shapes.items():
            cut = self.layer_cut(parameter)
            if cut is None:
                continue
            if parameter.endswith(".bias") and cut.kind is CutKind.ROW:
                if self.axis.index > 0:  # it is added once, by the first rank: partial results are added up
                    shards[parameter] = Shard(0, ())
                continue
            dim = 1 if cut.kind is CutKind.ROW else 0
            spans = cut_side(cut, shape[dim], self.heads, self.head_size, self.axis.index, self.axis.size)
            shards[parameter] = Shard(dim, spans)
        return shards

    def apply(self, model: nn.Module, traffic: Traffic) -> None:
        """Hook the cut layers, so that ranks add up or gather their outputs. The weights must be in place."""
        if self.axis.size == 1:
            return
        local_heads = len(split(Span(0, self.heads), self.axis.size)[self.axis.index])
        for name, module in model.named_modules():
            if name.partition(".")[0] not in self.plan and name not in self.plan and name not in self.outside:
                continue
            if hasattr(module, "processor") and self._cuts_any(name, module):
                module.heads = module.num_heads = local_heads
                module.inner_dim = local_heads * self.head_size
                if hasattr(module, "mlp_hidden_dim"):  # its layers hold the feed-forward too, and are split by both widths
                    module.mlp_hidden_dim = len(split(Span(0, module.mlp_hidden_dim), self.axis.size)[self.axis.index])
            cut = self.layer_cut(f"{name}.weight")
            if cut is None:
                continue
            if cut.kind is CutKind.NORM:
                SharedRMSNorm.adopt(module, self.axis, traffic)
                continue
            if cut.kind is CutKind.ROW:
                module.register_forward_hook(lambda _module, _input, out: all_reduce(out, self.axis, traffic))
            elif cut.kind is CutKind.GATHER:
                whole, ranks = module.out_features, self.axis.size
                parts = (cut_side(cut, whole, self.heads, self.head_size, rank, ranks) for rank in range(ranks))
                sizes = [sum(map(len, spans)) for spans in parts]
                module.register_forward_hook(functools.partial(_gather, sizes, self.axis, traffic))
            module.out_features, module.in_features = module.weight_shape

    def _cuts_any(self, name: str, module: nn.Module) -> bool:
        """Whether a layer of `module` is cut."""
        return any(self.layer_cut(f"{name}.{layer}.weight") for layer, _ in module.named_modules() if layer)


class SharedRMSNorm(nn.RMSNorm):
    """An RMSNorm over features that are cut over `axis`. The sum of squares is added up over the ranks."""

    width: int
    """Features of all ranks."""
    axis: Axis
    traffic: Traffic

    @staticmethod
    def adopt(norm: nn.RMSNorm, axis: Axis, traffic: Traffic) -> None:
        """Turn `norm`, whose weight is already this rank's part, into a SharedRMSNorm."""
        norm.__class__ = SharedRMSNorm
        assert isinstance(norm, SharedRMSNorm)
        (norm.width,), norm.axis, norm.traffic = norm.normalized_shape, axis, traffic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's features] -> the same shape. Computed in float32."""
        assert self.eps is not None
        wide = x.float()
        squares = all_reduce(wide.square().sum(dim=-1, keepdim=True), self.axis, self.traffic)
        scale = torch.rsqrt(squares / self.width + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


def _gather(
    sizes: list[int], axis: Axis, traffic: Traffic, _module: nn.Module, _input: tuple, out: torch.Tensor
) -> torch.Tensor:
    """Forward hook: [..., sizes of the rank] -> [..., sum(sizes)]."""
    return torch.cat(start_gather(out, sizes, out.ndim - 1, axis, traffic).wait(), dim=-1)
