"""Single files in diffusers' layout: what ComfyUI's own conversion makes of them, as rows of the file's tensors."""

from collections.abc import Mapping

import comfy.model_detection
import comfy.utils
import torch

from parallel_backend.core.setup import Conversion

from ..native.native_call import on_meta

Shapes = Mapping[str, tuple[int, ...]]
"""Of a file's tensors, by key."""


def conversion_of(shapes: Shapes) -> Conversion:
    """How ComfyUI converts a file in diffusers' layout. Empty: it does not convert the file.

    `shapes`: of a file that ComfyUI's detection does not know.
    """
    return _of_transformer(shapes) or _of_unet(shapes)


def _of_transformer(shapes: Shapes) -> Conversion:
    """ComfyUI converts row numbers in the place of weights, so that they show where each row comes from."""
    numbered, starts, start = {}, {}, 0
    for key, shape in shapes.items():
        rows = shape[0] if shape else 1
        numbered[key] = torch.arange(start, start + rows)
        starts[start] = key
        start += rows + 1  # the gap parts the rows of two tensors
    rest = dict(numbered)
    converted = comfy.model_detection.convert_diffusers_mmdit(rest, "")
    if converted is None or sum(map(len, converted.values())) != sum(len(numbered[key]) for key in numbered.keys() - rest):
        return ()  # None, or some of a tensor's rows are missing
    return tuple((key, tuple(_runs(rows, starts))) for key, rows in converted.items())


def _runs(rows: torch.Tensor, starts: Mapping[int, str]) -> list[tuple[str, int, int]]:
    """Row numbers -> (tensor, first row, row after the last), in order."""
    ends = [*(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist(), len(rows)]
    known = torch.tensor(list(starts))
    runs = []
    for begin, end in zip([0, *ends], ends, strict=False):
        first = int(rows[begin])
        start = int(known[torch.searchsorted(known, first, right=True) - 1])
        runs.append((starts[start], first - start, first - start + end - begin))
    return runs


def _of_unet(shapes: Shapes) -> Conversion:
    config = comfy.model_detection.model_config_from_diffusers_unet(on_meta(shapes))
    if config is None:
        return ()
    names = comfy.utils.unet_to_diffusers(config.unet_config)
    rows = {key: shape[0] if shape else 1 for key, shape in shapes.items()}
    return tuple((name, ((key, 0, rows[key]),)) for key, name in names.items() if key in shapes)
