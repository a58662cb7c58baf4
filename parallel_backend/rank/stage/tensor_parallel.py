"""Applies a plan of tensor parallelism: the linear layers of a block that are cut, and along which side.

As in Megatron-LM (arXiv 1909.08053), attention and feed-forward begin with column-cut layers (each rank has some output
features) and end with row-cut layers (each rank has some input features, and outputs are summed over the axis). Layers that
compute modulation vectors are column-cut and their small outputs gathered, so that every large weight is cut.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel_backend.core.spans import Shard
from parallel_backend.own_class.cuts.tensor_plan import CutKind, LayerCuts, cut_of, cut_side, shard_of
from parallel_backend.rank.comm.collectives import all_reduce, start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic


@dataclass(frozen=True)
class TensorPlan:
    """The plan for one rank of the tensor axis."""

    plan: LayerCuts
    axis: Axis

    def shard(self, parameter: str, shape: tuple[int, ...]) -> Shard | None:
        """Return this rank's shard of a parameter of this complete `shape`. None: the rank has all of it."""
        cut = cut_of(self.plan, parameter) if self.axis.size > 1 else None
        return None if cut is None else shard_of(cut, parameter, shape, self.axis.index, self.axis.size)

    def apply(self, model: nn.Module, traffic: Traffic) -> None:
        """Hook the cut layers, so that ranks sum or gather their outputs. The weights must be in place."""
        if self.axis.size == 1:
            return
        for name, cut in self.plan.items():
            module: Any = model.get_submodule(name)
            kind = CutKind(cut.kind)
            if kind is CutKind.NORM:
                SharedRMSNorm.adopt(module, self.axis, traffic)
                continue
            if kind is CutKind.ROW:
                module.register_forward_hook(lambda _module, _input, out: all_reduce(out, self.axis, traffic))
            elif kind is CutKind.GATHER:
                whole, ranks = module.out_features, self.axis.size
                parts = (cut_side(cut, whole, rank, ranks) for rank in range(ranks))
                sizes = [sum(map(len, spans)) for spans in parts]
                module.register_forward_hook(functools.partial(_gather, sizes, self.axis, traffic))
            module.out_features, module.in_features = module.weight_shape


class SharedRMSNorm(nn.RMSNorm):
    """An RMSNorm over features that are cut over `axis`. The sum of squares is summed over the ranks."""

    width: int
    """Number of features of all ranks together."""
    axis: Axis
    traffic: Traffic

    @staticmethod
    def adopt(norm: nn.RMSNorm, axis: Axis, traffic: Traffic) -> None:
        """Turn `norm`, whose weight is already this rank's part, into a SharedRMSNorm."""
        norm.__class__ = SharedRMSNorm
        assert isinstance(norm, SharedRMSNorm)
        (norm.width,), norm.axis, norm.traffic = norm.normalized_shape, axis, traffic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize [..., this rank's features], computed in float32."""
        assert self.eps is not None
        wide = x.float()
        squares = all_reduce(wide.square().sum(dim=-1, keepdim=True), self.axis, self.traffic)
        scale = torch.rsqrt(squares / self.width + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


def _gather(
    sizes: list[int], axis: Axis, traffic: Traffic, _module: nn.Module, _input: tuple, out: torch.Tensor
) -> torch.Tensor:
    """Forward hook that gathers [..., sizes of the rank] to [..., sum(sizes)]."""
    return torch.cat(start_gather(out, sizes, out.ndim - 1, axis, traffic).wait(), dim=-1)
