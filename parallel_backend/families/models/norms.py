"""diffusers' norm modules in few operations: the same values, computed in float32 and rounded once."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models import normalization as original
from torch import nn

from . import fused


class RMSNorm(original.RMSNorm):
    """diffusers' class in one operation instead of five."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., C] -> the same shape. With a weight in float32 and an input that is not, diffusers' result is float32."""
        if self.weight is not None and self.weight.dtype != hidden_states.dtype:
            return super().forward(hidden_states)
        out = F.rms_norm(hidden_states, tuple(self.dim), self.weight, self.eps)
        return out if self.bias is None else out + self.bias


class FP32LayerNorm(original.FP32LayerNorm):
    """diffusers' class without copies in float32: torch's kernel computes in it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., C] -> the same shape."""
        if self.weight is not None and self.weight.dtype != inputs.dtype:
            return super().forward(inputs)
        return F.layer_norm(inputs, self.normalized_shape, self.weight, self.bias, self.eps)


class AdaLayerNormZero(original.AdaLayerNormZero):
    """diffusers' class with its modulation fused."""

    def forward(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        """[b, s, C] -> modulated [b, s, C], and four vectors [b, C]: gate, shift, scale, gate."""
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, gate, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
        return fused.modulated(self.norm, x, scale[:, None], shift[:, None]), gate, *others


class AdaLayerNormZeroSingle(original.AdaLayerNormZeroSingle):
    """diffusers' class with its modulation fused."""

    def forward(self, x: torch.Tensor, emb: torch.Tensor | None = None) -> Any:
        """[b, s, C] -> modulated [b, s, C], and the gate [b, C]."""
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return fused.modulated(self.norm, x, scale[:, None], shift[:, None]), gate


class AdaLayerNormContinuous(original.AdaLayerNormContinuous):
    """diffusers' class with its modulation fused."""

    def forward(self, x: torch.Tensor, conditioning_embedding: torch.Tensor) -> torch.Tensor:
        """[b, s, C] -> the same shape."""
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return fused.modulated(self.norm, x, scale[:, None], shift[:, None])


CLASSES: dict[type, type] = {
    original.RMSNorm: RMSNorm,
    original.FP32LayerNorm: FP32LayerNorm,
    original.AdaLayerNormZero: AdaLayerNormZero,
    original.AdaLayerNormZeroSingle: AdaLayerNormZeroSingle,
    original.AdaLayerNormContinuous: AdaLayerNormContinuous,
}
"""diffusers' class -> ours."""


def fuse_norms(model: nn.Module) -> None:
    """Replace the forwards of diffusers' norms. Parameters and names stay."""
    fused.adopt(model, CLASSES)
