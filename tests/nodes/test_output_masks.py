"""Masks of noise that MiniMax H3's class multiplies its outputs by, or does not: ranks follow the class that is there."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.core.spans import Span
from parallel_backend.families import FAMILIES

H3 = FAMILIES["minimax-h3"]
NAMES = H3.inputs.output_masks
ROWS = Span(0, 2), Span(2, 6)


def class_that(multiplies):
    """The `forward` of a class that multiplies these outputs by their masks."""

    def forward(self, x, timestep, context, transformer_options={}, **masks):  # noqa: B006
        outputs = self._forward(x, timestep, context, transformer_options, **masks)
        each = zip(outputs, map(masks.get, NAMES), multiplies, strict=True)
        return [out * mask if does and mask is not None else out for out, mask, does in each]

    return forward


@pytest.mark.parametrize("multiplies", [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("given", [NAMES, NAMES[:1], NAMES[1:], ()])
@pytest.mark.parametrize("along", ["rows", "frames"])
def test_outputs_and_bands_are_multiplied_as_the_class_does(module, multiplies, given, along):
    masked, generator = module("model.output_masks").masked, torch.Generator().manual_seed(0)
    outputs = torch.randn(1, 24, 6, 6, 4, generator=generator), torch.randn(1, 32, 2, 5, generator=generator)
    masks = {name: torch.rand(1, 1, *out.shape[2:], generator=generator) for name, out in zip(NAMES, outputs, strict=True)}
    call = {name: masks[name] for name in given}
    forward = class_that(multiplies)
    native = type("Native", (), {"_forward": lambda *_arguments, **_named: list(outputs)})
    expected = tuple(forward(native(), outputs, torch.ones(1), None, **call))
    whole = masked(forward, NAMES, outputs, call, None)
    assert all(map(torch.equal, whole, expected))
    patching = replace(H3.patching, along=along)
    bands = [masked(forward, NAMES, patching.band(outputs, rows), call, (patching, rows)) for rows in ROWS]
    assert all(map(torch.equal, patching.join(bands), expected))
