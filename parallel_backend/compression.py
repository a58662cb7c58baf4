"""Values in one byte each on their way between ranks: what Ulysses sends over slow links."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .collectives import all_to_all
from .mesh import Axis
from .traffic import Traffic

LARGEST = {"int8": 127.0, "fp8": 448.0}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE = torch.bfloat16


@dataclass(frozen=True)
class Codec:
    kind: str
    centred: bool = True
    group: int = 0
    mean_dtype: torch.dtype = torch.bfloat16

    def fake(self, x):
        """[tokens, columns, D] -> dequantised"""
        x = x.float()
        shape = x.shape
        mean = 0
        if self.centred:
            mean = x.mean(0, keepdim=True).to(self.mean_dtype).float()
            x = x - mean
        g = self.group or shape[-1]
        x = x.reshape(*shape[:-1], shape[-1] // g, g)
        scale = (x.abs().amax(-1, keepdim=True) / LARGEST[self.kind] * 1.004).clamp_min(1e-30).to(SCALE).float()
        y = x / scale
        y = y.round().clamp(-127, 127) if self.kind == "int8" else y.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return (y * scale).reshape(shape) + mean
