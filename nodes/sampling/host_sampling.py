"""Bands are sampled on the host: what their samplers compute is small, and every look at a busy GPU waits for its turn.

Rank 0 keeps the GPU busy that ComfyUI uses, and a driver gives processes their turns by time. A band's call on that GPU
stopped the host ten times and more: to compare, to check, to copy. On the host it stops nowhere. The latent and the
conditioning are copied once in a run, noise is drawn where ComfyUI would draw it and copied once a draw.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import comfy.conds
import comfy.samplers
import torch

from .eligibility import Sampling

HOST = torch.device("cpu")


class SharedCond(comfy.conds.CONDRegular):
    """A value of the conditioning that stays the same in a run: what ComfyUI makes of it for a call is made once.

    So every call of every band gets the same tensor, which is known to the ranks without a look at its values. It counts
    how often it is written to, unlike tensors of ComfyUI's inference mode.
    """

    def __init__(self, value: comfy.conds.CONDRegular, dtype: torch.dtype | None):
        """`value`: on the host. `dtype`: what the model is going to cast it to; None leaves that to the call."""
        super().__init__(value.cond)
        self.value, self.dtype = value, dtype
        self._processed: dict[int, SharedCond] = {}
        self._joined: dict[tuple[int, ...], tuple[Sequence[SharedCond], torch.Tensor]] = {}

    # Bands call these at the same time, each on its own thread: whoever comes first makes what all of them get.

    def process_cond(self, batch_size: int, **named: Any) -> "SharedCond":
        if batch_size not in self._processed:
            made = SharedCond(self.value.process_cond(batch_size=batch_size, **named), self.dtype)
            self._processed.setdefault(batch_size, made)
        return self._processed[batch_size]

    def can_concat(self, other: comfy.conds.CONDRegular) -> bool:
        return isinstance(other, SharedCond) and self.value.can_concat(other.value)

    def concat(self, others: Sequence["SharedCond"]) -> torch.Tensor:
        key = tuple(map(id, others))
        if key not in self._joined:
            with torch.inference_mode(False), torch.no_grad():
                joined = self.value.concat([other.value for other in others]).to(self.dtype)
                if joined.is_inference():
                    joined = joined.clone()
            self._joined.setdefault(key, (others, joined))  # whose ids stay theirs while they are kept
        return self._joined[key][1]

    def size(self) -> list[int]:
        return self.value.size()


def on_host(sampling: Sampling) -> Sampling:
    """The same sampling with its tensors on the host."""
    latent, mask = sampling.latent_image, sampling.denoise_mask
    return replace(
        sampling,
        guider=_host_guider(sampling.guider),
        sigmas=sampling.sigmas.cpu(),
        noise=sampling.noise.cpu(),
        latent_image=None if latent is None else latent.cpu(),
        denoise_mask=None if mask is None else mask.cpu(),
    )


def _host_guider(guider: comfy.samplers.CFGGuider) -> comfy.samplers.CFGGuider:
    """A copy of the guider whose conditioning, and whose table of sigmas, are on the host."""
    host = copy.copy(guider)
    host.inner_model = _host_model(guider.inner_model)
    dtype = guider.inner_model.diffusion_model.dtype
    made: dict[int, comfy.conds.CONDRegular] = {}  # conditionings that have a value in common go on having one
    host.conds = {name: conds and [_host_cond(cond, dtype, made) for cond in conds] for name, conds in guider.conds.items()}
    return host


def _host_model(model: torch.nn.Module) -> torch.nn.Module:
    """ComfyUI's BaseModel with a table of sigmas on the host: families with a discrete schedule look each time up in it."""
    if all(buffer.device == HOST for buffer in model.model_sampling.buffers()):
        return model
    host = copy.copy(model)
    host._modules = dict(model._modules)
    host.model_sampling = copy.deepcopy(model.model_sampling).to(HOST)
    return host


def _host_cond(cond: dict, dtype: torch.dtype, made: dict[int, comfy.conds.CONDRegular]) -> dict:
    controlled = cond.get("control") is not None  # a ControlNet is given it too, as exact as it is
    values = {}
    for name, value in cond["model_conds"].items():
        if id(value) not in made:
            made[id(value)] = _host_value(value, None if controlled or name == "c_concat" else dtype)
        values[name] = made[id(value)]
    mask = {} if cond.get("mask") is None else {"mask": cond["mask"].cpu()}
    return {**cond, **mask, "model_conds": values}


def _host_value(value: comfy.conds.CONDRegular, dtype: torch.dtype | None) -> comfy.conds.CONDRegular:
    tensor = value.cond
    if isinstance(tensor, list):
        return value._copy_with([each.cpu() if isinstance(each, torch.Tensor) else each for each in tensor])
    if not isinstance(tensor, torch.Tensor):
        return value
    here = value._copy_with(tensor.cpu())
    if type(value) not in (comfy.conds.CONDRegular, comfy.conds.CONDCrossAttn):  # cut by band, or not joined by call
        return here
    return SharedCond(here, dtype if tensor.is_floating_point() else None)
