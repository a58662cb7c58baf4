"""The linear layers of a rank: weights may stay packed on the device, as the file has them, and adapters may be added.

`nn.Linear` modules of diffusers' class become these by a change of class, so every name in the module tree stays.
"""

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.checkpoints.packed_formats import Packing

Adapter = tuple[torch.Tensor, torch.Tensor | None]
"""(up [out, r], down [r, in]) in the compute dtype, on the layer's device: what a low-rank adapter adds to the weight.

Without `down`, `up` is [out, in].
"""


class RankLinear(nn.Linear):
    """A linear layer of a rank; `weight` [out, in] and `bias` [out] (or None) in the compute dtype.

    Under tensor parallelism these are the rank's shard, and `adapters` have to be cut as the weight is. What other ranks
    add is added by forward hooks, so adapters count before it.
    """

    adapters: list[Adapter]

    @staticmethod
    def adopt(model: nn.Module) -> None:
        """Make every plain linear layer of `model` one of these."""
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = RankLinear
                module.adapters = []

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(out, in) of this rank's weight, packed or not."""
        return tuple(self.weight.shape)

    def pack(self, packed: torch.Tensor, packing: Packing, dtype: torch.dtype) -> None:
        """Keep this layer's weight as `packed` [out, n] uint8 from now on; it is expanded to `dtype` at each use."""
        del self.weight
        self.__class__ = PackedLinear
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.packing, self.dtype = packing, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out = F.linear(x, self.weight, self.bias)
        for up, down in self.adapters:
            out += F.linear(x if down is None else F.linear(x, down), up)
        return out


class PackedLinear(RankLinear):
    """One whose weight is parameter `packed`. Reading `weight` expands it anew, for the time it is held.

    The parameter is of bytes, whatever they hold: diffusers' code takes a floating parameter's dtype for the one it
    computes in.
    """

    packed: nn.Parameter
    packing: Packing
    dtype: torch.dtype  # the compute dtype

    @property
    def weight(self) -> torch.Tensor:
        return self.packing.expand(self.packed, self.dtype)

    @property
    def weight_shape(self) -> tuple[int, int]:
        rows, row_bytes = self.packed.shape
        return rows, self.packing.columns(row_bytes)
