"""The guider of one band. Conditioning with the latent's shape is cut to the band's rows, and ComfyUI's BaseModel gets the
shapes of the band's nested latents.

A video model's denoise mask stays whole, because every band needs the timesteps of all frames, which it determines.
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

from .band_controlnet import BandedControl
from .band_exchange import BandExchange

VIDEO_VALUES = "_v_numel"
"""Attribute of ComfyUI's Guider_LTXAVDualCFG: number of the video's values, which are first in a nested latent."""
WHOLE = ("image_cond",)
"""Conditioning that is not cut although it has the latent's shape: HiDream-E1's reference image."""


def banded_controls(
    guider: comfy.samplers.CFGGuider, cut: BandCut, exact_above: float, extrapolate: bool, device: torch.device
) -> dict[int, BandedControl]:
    """`id` of each ControlNet in the conditioning -> its BandedControl, which all bands share."""
    conds = (cond for conds in guider.conds.values() for cond in conds or ())
    controls = (cond["control"] for cond in conds if cond.get("control") is not None)
    return {id(control): BandedControl(control, cut, exact_above, extrapolate, device) for control in controls}


@contextmanager
def releasing_waiters(exchanges: Sequence[BandExchange], index: int) -> Iterator[None]:
    """Context around the sampler of band `index`. When the sampler ends, bands that still wait for it get an error."""
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
    """Return a copy of the guider, for band `index`."""
    band = copy.copy(guider)
    # Conditionings that share a ControlNet must share its stand-in: ComfyUI then evaluates them as one batch.
    stand_ins = {control_id: control.band(index) for control_id, control in controls.items()}
    band.conds = {
        name: conds and [_cut(cond, cut, index, stand_ins) for cond in conds] for name, conds in guider.conds.items()
    }
    if len(cut.shapes) > 1:
        band.inner_model = copy.copy(guider.inner_model)
        band.inner_model.latent_shapes = list(cut.shapes_of(index))
        if getattr(guider, VIDEO_VALUES, None) is not None:
            setattr(band, VIDEO_VALUES, math.prod(cut.shapes_of(index)[0][1:]))
    return band


def _cut(cond: dict, cut: BandCut, index: int, controls: dict) -> dict:
    band_cond, values = dict(cond), dict(cond["model_conds"])
    if cond.get("control") is not None:
        band_cond["control"] = controls[id(cond["control"])]
    for name, value in values.items():
        if isinstance(value, comfy.conds.CONDNoiseShape) and name not in WHOLE:
            values[name] = value._copy_with(cut.patching.rows(value.cond, cut.rows[index]))
    if cond.get("mask") is not None:
        band_cond["mask"] = cut_mask(cond["mask"], cut, index)
    if "latent_shapes" in values:
        values["latent_shapes"] = comfy.conds.CONDConstant(list(cut.shapes_of(index)))
    return band_cond | {"model_conds": values}


def cut_mask(mask: torch.Tensor, cut: BandCut, index: int) -> torch.Tensor:
    """Return the band's part of a conditioning's mask [B, (T,) H, W]. T = 1 is a mask for all frames."""
    dim, size = cut.patching.band_dim, cut.shapes[0][cut.patching.band_dim]
    if mask.shape[dim] == 1 and mask.ndim == len(cut.shapes[0]) - 1:
        return mask
    if mask.shape[dim] != size:
        raise NotLocal("the conditioning's mask and the latent differ in size")
    return cut.patching.rows(mask, cut.rows[index])
