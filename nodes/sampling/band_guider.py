"""The guider of one band: conditioning that is joined to the latent is cut to the band's rows, and ComfyUI's BaseModel is
told the shapes of the band's nested latents.

A video model's mask of what is given stays whole: the timesteps made from it are those of the whole video in every band.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import comfy.conds
import comfy.samplers
import torch

from parallel_backend.client.pipefusion.band_cut import BandCut
from parallel_backend.core.spans import Span
from parallel_backend.families.base.patching import Patching

from .band_controlnet import BandedControl

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
def releasing_waiters(controls: dict[int, BandedControl], index: int) -> Iterator[None]:
    """Around the sampler of band `index`. However it ends, bands that wait for its ControlNet latents go on or fail."""
    try:
        yield
    except BaseException as error:
        for control in controls.values():
            control.close(error)
        raise
    for control in controls.values():
        control.finish(index)


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
    if "latent_shapes" in values:
        values["latent_shapes"] = comfy.conds.CONDConstant(list(cut.shapes_of(index)))
    return own | {"model_conds": values}
