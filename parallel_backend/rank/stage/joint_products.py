"""One product for layers that are one layer in the file, such as query, key and value: their input is rounded once for all.

ComfyUI's classes multiply by such a layer as it is. A quantised product first rotates and rounds its input: on a CPU one
product of 1,536 rows takes 6.1 ms, and three of 512 rows 9.8.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from parallel_backend.checkpoints.packed_formats import Packing
from parallel_backend.checkpoints.quantised_formats import Quantised
from parallel_backend.core.kitchen import kitchen
from parallel_backend.families.base.file_layout import Source

from .quantised_products import Arithmetic, KitchenWeight

JOINED = frozenset({"int8_tensorwise", "convrot_w4a4", "float8_e4m3fn"})
"""Formats of such products. Their scales are one for each row, or one for all, of the file's layer."""

LARGEST = 1 << 26
"""Bytes of all layers' outputs up to which they are computed together. A layer's part keeps the memory of all, so that the
values stay until attention has ended, where queries and keys by themselves are freed once they are rotated."""


class Layer(Protocol):
    """What is read of a PackedLinear (linear.py), and `joint`, which is set."""

    packed: torch.nn.Parameter
    packing: Packing
    arithmetic: Arithmetic
    dtype: torch.dtype
    joint: "JointProduct | None"

    @property
    def bias(self) -> torch.Tensor | None: ...


class JointProduct:
    """The product with the weights of `layers` together, whose memory is in a row where the rank can join them.

    The layer that is called first computes all layers' outputs. The others take theirs if they are called with the same
    tensor. If one of them ever is not, each layer computes its own from there on: so the model's code decides, and a result
    does not depend on it.
    """

    def __init__(self, layers: Sequence[Layer]):
        self._layers = tuple(layers)
        self._stops = list(accumulate(len(layer.packed) for layer in layers))
        """Behind each layer's rows, those of all layers counted."""
        self._weight: KitchenWeight | None = None
        self._is_built = self._is_off = False
        self._input: torch.Tensor | None = None
        """The input whose outputs are in `_outputs`. Its identity is compared, since inference tensors count no writes."""
        self._outputs: dict[int, torch.Tensor] = {}
        """By `id` of the layer, those that have not been asked for."""

    def forget(self) -> None:
        """To be called when a layer's weight has got other memory."""
        self._weight, self._is_built = None, False

    def multiply(self, layer: Layer, x: torch.Tensor) -> torch.Tensor | None:
        """`layer`'s product, [..., in] -> [..., out], a view of all layers'. None: the layer has to compute it."""
        if self._is_off:
            return None
        if x is self._input:
            output = self._outputs.pop(id(layer), None)
            if output is not None:
                if not self._outputs:
                    self._input = None
                return output
        if self._input is not None:  # a layer has not asked for the last input's output
            self._is_off, self._input, self._weight = True, None, None
            self._outputs.clear()
            return None
        if not self._is_built:
            self._weight, self._is_built = self._build(), True
        if self._weight is None or x.numel() // x.shape[-1] * self._stops[-1] * x.itemsize > LARGEST:
            return None
        biases: list[torch.Tensor] = [each.bias for each in self._layers if each.bias is not None]
        if len(biases) not in (0, len(self._layers)):
            return None
        whole = self._weight.linear(x, torch.cat(biases) if biases else None)  # joined anew: LoRAs change biases in place
        for each, stop in zip(self._layers, self._stops, strict=True):
            self._outputs[id(each)] = whole[..., stop - len(each.packed) : stop]
        self._input = x
        return self._outputs.pop(id(layer))

    def _build(self) -> KitchenWeight | None:
        """The weights together. None: they are not in a row, or are not multiplied by comfy-kitchen."""
        first, weights = self._layers[0], [each.arithmetic.weight for each in self._layers]
        if not all(weight is not None and weight.multiplies and weight.format in JOINED for weight in weights):
            return None
        parts = [each.packed for each in self._layers]
        memory = {part.untyped_storage().data_ptr() for part in parts}
        in_a_row = all(part.data_ptr() + part.nbytes == after.data_ptr() for part, after in pairwise(parts))
        if len(memory) > 1 or not in_a_row:
            return None
        columns = parts[0].shape[1]
        packed = parts[0].detach().as_strided((self._stops[-1], columns), (columns, 1))
        packing = first.packing
        if isinstance(packing, Quantised):
            scales = [each.packing.tensors["weight_scale"] for each in self._layers]
            if any(scale.numel() > 1 for scale in scales):
                packing = packing.on({"weight_scale": torch.cat(scales)})
        tensors = kitchen().tensors
        assert tensors is not None
        return KitchenWeight(tensors, packed, packing, first.dtype, True)


def join(layers: Mapping[str, Layer], sources: Mapping[str, Source]) -> list[tuple[str, ...]]:
    """Give layers that are rows of the same layer of the file a JointProduct. Returns their parameters' names, together.

    `layers`: packed layers, by their weight's name. `sources`: where the file has each parameter (Checkpoint.key_map).
    """
    by_key: dict[tuple[str, int], list[str]] = {}
    for target, layer in layers.items():
        by_key.setdefault((sources[target].key, layer.packed.shape[1]), []).append(target)
    joined = [tuple(targets) for targets in by_key.values() if len(targets) > 1]
    for targets in joined:
        product = JointProduct([layers[target] for target in targets])
        for target in targets:
            layers[target].joint = product
    return joined
