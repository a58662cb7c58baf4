"""The guider of one band: conditioning that is joined to the latent is cut to the band's rows, and ComfyUI's BaseModel is
told the shapes of the band's nested latents.

A video model's mask of what is given stays whole: the timesteps made from it are those of the whole video in every band.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import comfy.conds
import comfy.samplers
import torch

from parallel_backend.client.pipefusion.band_cut import BandCut
from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.spans import Span
from parallel_backend.families.base.patching import Patching

from .band_controlnet import BandedControl
from .band_exchange import BandExchange

VIDEO_VALUES = "_v_numel"
"""Attribute of ComfyUI's Guider_LTXAVDualCFG: values of the video in what it sees, behind which are those of the sound."""
WHOLE = ("image_cond",)
"""What ComfyUI gives with the latent's shape but is no part of it: HiDream-E1's picture beside the latent, a reference."""


def banded_controls(
    guider: comfy.samplers.CFGGuider,
    patching: Patching,
    rows: tuple[Span, ...],
    shape: tuple[int, ...],
    exact_above: float,
    extrapolate: bool,
    device: torch.device,
) -> dict[int, BandedControl]:
    """`id` of each ControlNet in the conditioning -> what the bands share of it. `device`: see BandedControl."""
    found = (cond["control"] for conds in guider.conds.values() for cond in conds or () if cond.get("control") is not None)
    settings = (patching, rows, shape, exact_above, extrapolate, device)
    return {id(control): BandedControl(control, *settings) for control in found}


@contextmanager
def releasing_waiters(exchanges: Sequence[BandExchange], index: int) -> Iterator[None]:
    """Around the sampler of band `index`. However it ends, bands that wait for what it would have given go on or fail."""
    try:
        yield
    except BaseException as error:
        for exchange in exchanges:
            exchange.close(error)
        raise
    for exchange in exchanges:
        exchange.finish(index)


def band_guider(
    guider: comfy.samplers.CFGGuider, cut: BandCut, index: int, controls: dict[int, BandedControl]
) -> comfy.samplers.CFGGuider:
    """A copy of the guider, for band `index`."""
    band = copy.copy(guider)
    # Conditionings with one ControlNet are evaluated as one batch if they have one object here too.
    own = {number: control.band(index) for number, control in controls.items()}
    band.conds = {name: conds and [_cut(cond, cut, index, own) for cond in conds] for name, conds in guider.conds.items()}
    if len(cut.shapes) > 1:
        band.inner_model = copy.copy(guider.inner_model)
        band.inner_model.latent_shapes = list(cut.shapes_of(index))
        if getattr(guider, VIDEO_VALUES, None) is not None:
            setattr(band, VIDEO_VALUES, math.prod(cut.shapes_of(index)[0][1:]))
    return band


def _cut(cond: dict, cut: BandCut, index: int, controls: dict) -> dict:
    own, values = dict(cond), dict(cond["model_conds"])
    if cond.get("control") is not None:
        own["control"] = controls[id(cond["control"])]
    for name, value in values.items():
        if isinstance(value, comfy.conds.CONDNoiseShape) and name not in WHOLE:
            values[name] = value._copy_with(cut.patching.rows(value.cond, cut.rows[index]))
    if cond.get("mask") is not None:
        own["mask"] = cut_mask(cond["mask"], cut, index)
    if "latent_shapes" in values:
        values["latent_shapes"] = comfy.conds.CONDConstant(list(cut.shapes_of(index)))
    return own | {"model_conds": values}


def cut_mask(mask: torch.Tensor, cut: BandCut, index: int) -> torch.Tensor:
    """The band's part of a conditioning's mask [B, (T,) H, W], which may be the same for all frames: T = 1."""
    dim, size = cut.patching.band_dim, cut.shapes[0][cut.patching.band_dim]
    if mask.shape[dim] == 1 and mask.ndim == len(cut.shapes[0]) - 1:
        return mask
    if mask.shape[dim] != size:
        raise NotLocal("the conditioning's mask is not of the latent's size")
    return cut.patching.rows(mask, cut.rows[index])
