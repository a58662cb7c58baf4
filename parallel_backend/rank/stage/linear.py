"""Linear layers whose weights may stay packed as in the file, and which can have adapters (LoRA). `nn.Linear` modules are
turned into these by changing their class, so that all names in the module tree stay."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.checkpoints.packed_formats import Fp8, Packing
from parallel_backend.core.fused_linear import FusedLinear

from .quantised_products import Arithmetic, arithmetic

Adapter = tuple[torch.Tensor, torch.Tensor | None]
"""(up [out, r], down [r, in]) of a low-rank adapter, in the compute dtype on the layer's device.

Without `down`, `up` is [out, in].
"""


class RankLinear(FusedLinear):
    """A rank's linear layer. `weight` [out, in] and `bias` [out] (or None) are in the compute dtype.

    Under tensor parallelism both are the rank's shard, and `adapters` must be cut in the same way. Forward hooks sum or
    gather over the ranks after adapters are added.
    """

    adapters: list[Adapter]

    @staticmethod
    def adopt(model: nn.Module) -> None:
        """Turn every `nn.Linear` of `model` into a RankLinear."""
        for module in model.modules():
            if type(module) in (nn.Linear, FusedLinear):
                module.__class__ = RankLinear
                assert isinstance(module, RankLinear)
                module.adapters = []

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(out, in) of this rank's weight, packed or not."""
        rows, columns = self.weight.shape
        return rows, columns

    def pack(self, packed: torch.Tensor, packing: Packing, dtype: torch.dtype) -> None:
        """Replace the weight with `packed` [out, n] uint8. `dtype`: the dtype of the layer's input."""
        del self.weight
        self.__class__ = PackedLinear
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.packing, self.dtype = packing, dtype
        self.arithmetic = Arithmetic(None, "") if packed.is_meta else arithmetic(packed, packing, dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product without adapters: [..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product with adapters: [..., in] -> [..., out]."""
        out = self.multiply(input)
        for up, down in self.adapters:
            out += F.linear(input if down is None else F.linear(input, down), up)
        return out


class PackedLinear(RankLinear):
    """A RankLinear whose weight is packed. Each reading of `weight` expands it, unless it is kept expanded
    (ExpandedWeights). The product uses the packed weight if the device can (quantised_products.py). Adapters are added
    without rounding."""

    packed: nn.Parameter
    """[out, n] uint8 for every kind of packing."""
    packing: Packing
    dtype: torch.dtype
    """The compute dtype."""
    arithmetic: Arithmetic
    expanded: torch.Tensor | None = None
    """[out, in] in the compute dtype. None: not kept."""
    keep: "Callable[[PackedLinear, torch.Tensor], None] | None" = None
    """Called with each expanded weight, which it may keep in `expanded`."""

    @property
    def expands(self) -> bool:
        """Whether products expand the weight."""
        return self.arithmetic.weight is None or not self.arithmetic.weight.multiplies

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and its scales."""
        return self.packed.nbytes + self.packing.nbytes

    def move(self, packed: torch.Tensor, scales: Mapping[str, torch.Tensor]) -> None:
        """Use the memory of `packed` and `scales` (Packing.tensors) for the weight, whatever it contains now."""
        if self.packed.is_meta:  # a meta tensor's data cannot be set to a device's
            self.packed = nn.Parameter(packed, requires_grad=False)
        else:
            self.packed.data = packed
        self.packing = self.packing.on(scales)
        self.arithmetic = arithmetic(packed, self.packing, self.dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product without adapters: [..., in] -> [..., out]."""
        weight = self.arithmetic.weight
        if weight is None:
            return super().multiply(x)
        return weight.linear(x, self.bias, self._expand)

    @property
    def weight(self) -> torch.Tensor:
        if self.arithmetic.weight is None:
            return self._expand(self._expand_packed)
        return self._expand_packed()  # not `expanded`: comfy-kitchen's weight is without the input's smoothing

    def _expand_packed(self) -> torch.Tensor:
        return self.packing.expand(self.packed, self.dtype)

    def _expand(self, expand: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.expanded is not None:
            return self.expanded
        weight = expand()
        if self.keep is not None:
            self.keep(self, weight)
        return weight

    @property
    def weight_shape(self) -> tuple[int, int]:
        rows, row_bytes = self.packed.shape
        return rows, self.packing.columns(row_bytes)


def multiply_plain_fp8(model: nn.Module) -> None:
    """Have layers with unscaled fp8 weights multiply in fp8 if the device can, instead of expanding the weights. To be
    called before weights are read. Inputs are scaled by their largest value; ComfyUI clips them at 448 instead."""
    for module in model.modules():
        if isinstance(module, PackedLinear) and isinstance(module.packing, Fp8) and module.packing.scale is None:
            module.packing = replace(module.packing, full_precision=False)
