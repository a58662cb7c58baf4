"""Samples bands on the host, because samplers compute little, and each synchronization with a busy GPU takes a long time.

Rank 0 keeps ComfyUI's GPU busy, and the driver switches between processes by time slices. A band's sampler on that GPU would
wait for it at least ten times in each call: to compare, to check, to copy. The latent and the conditioning are copied to the
host once in a run. Noise is drawn on the device on which ComfyUI would draw it, and each draw is copied once.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import comfy.conds
import comfy.model_base
import comfy.samplers
import torch

from .eligibility import Sampling

HOST = torch.device("cpu")


class SharedCond(comfy.conds.CONDRegular):
    """A value of the conditioning that stays the same in a whole run. ComfyUI's tensor of it for a call is created once.

    So all calls of all bands get the same tensor, which the client sends once, without comparing values. It is created
    outside of ComfyUI's inference mode, because inference tensors do not count writes (`_version`).
    """

    def __init__(self, value: comfy.conds.CONDRegular, dtype: torch.dtype | None):
        """`value`: on the host. `dtype`: to which the model casts the value. None: the call casts it."""
        super().__init__(value.cond)
        self.value, self.dtype = value, dtype
        self._processed: dict[int, SharedCond] = {}
        self._joined: dict[tuple[int, ...], tuple[Sequence[SharedCond], torch.Tensor]] = {}

    # The bands' threads call these functions at the same time. `setdefault` makes all of them get the first result.

    def process_cond(self, batch_size: int, **named: Any) -> "SharedCond":
        if batch_size not in self._processed:
            processed = SharedCond(self.value.process_cond(batch_size=batch_size, **named), self.dtype)
            self._processed.setdefault(batch_size, processed)
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
            self._joined.setdefault(key, (others, joined))  # `others` are kept so that no new object gets one of the ids
        return self._joined[key][1]

    def size(self) -> list[int]:
        return self.value.size()


def on_host(sampling: Sampling) -> Sampling:
    """Return the same sampling with its tensors on the host."""
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
    """Return a copy of the guider with its conditioning and its table of sigmas on the host."""
    host = copy.copy(guider)
    host.inner_model = _host_model(guider.inner_model)
    dtype = guider.inner_model.diffusion_model.dtype
    values: dict[int, comfy.conds.CONDRegular] = {}  # id -> value on the host: shared values stay shared
    host.conds = {
        name: conds and [_host_cond(cond, dtype, values) for cond in conds] for name, conds in guider.conds.items()
    }
    return host


def _host_model(model: comfy.model_base.BaseModel) -> comfy.model_base.BaseModel:
    """Return the model with its table of sigmas on the host. Discrete schedules look up each timestep in the table."""
    if all(buffer.device == HOST for buffer in model.model_sampling.buffers()):
        return model
    host = copy.copy(model)
    host._modules = dict(model._modules)
    host.model_sampling = copy.deepcopy(model.model_sampling).to(HOST)
    return host


def _host_cond(cond: dict, dtype: torch.dtype, host_values: dict[int, comfy.conds.CONDRegular]) -> dict:
    has_control = cond.get("control") is not None  # a ControlNet gets the values too, and needs them in full precision
    values = {}
    for name, value in cond["model_conds"].items():
        if id(value) not in host_values:
            host_values[id(value)] = _host_value(value, None if has_control or name == "c_concat" else dtype)
        values[name] = host_values[id(value)]
    mask = {} if cond.get("mask") is None else {"mask": cond["mask"].cpu()}
    return {**cond, **mask, "model_conds": values}


def _host_value(value: comfy.conds.CONDRegular, dtype: torch.dtype | None) -> comfy.conds.CONDRegular:
    tensor = value.cond
    if isinstance(tensor, list):
        return value._copy_with([each.cpu() if isinstance(each, torch.Tensor) else each for each in tensor])
    if not isinstance(tensor, torch.Tensor):
        return value
    host_value = value._copy_with(tensor.cpu())
    if type(value) not in (comfy.conds.CONDRegular, comfy.conds.CONDCrossAttn):  # others are cut by band or never joined
        return host_value
    return SharedCond(host_value, dtype if tensor.is_floating_point() else None)
