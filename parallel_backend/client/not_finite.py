"""Finds NaN and infinity in inputs and outputs, and says what to change."""

from collections.abc import Mapping

import torch

from parallel_backend.core.dtypes import compute_name


class NotFiniteError(RuntimeError):
    """Raised if the model's output has NaN or infinity. The run ends, and the ranks stay."""


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no NaN and no infinity. One pass if so, because a sum of finite values hardly ever overflows
    float32."""
    if not tensor.is_floating_point():
        return True
    total = tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def check_latent(x: torch.Tensor, timestep: torch.Tensor) -> None:
    """Raise ValueError, naming the sampler's input, if values of a call are NaN or infinite."""
    if not all_finite(timestep):
        raise ValueError("sigmas: they have values that are not finite (NaN or infinite). Use another scheduler.")
    if not all_finite(x):
        raise ValueError(
            "latent_image: the sampler gave the model a latent with values that are not finite (NaN or infinite), at "
            f"the model's time {float(timestep.max()):.4g}. If this is the first step, check the node before the "
            "sampler. In a later step, the sampler caused them: lower cfg, or use another sampler or scheduler."
        )


def check_conditioning(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if conditioning tensors have NaN or infinity. Masks of scores may have them."""
    for name, tensor in tensors.items():
        if "mask" not in name and not all_finite(tensor):
            raise ValueError(
                f"positive, negative: the conditioning's '{name}' holds values that are not finite (NaN or infinite). "
                "Check the text encoder, its file and dtype, and the nodes that change the conditioning."
            )


def not_finite(dtype: str, adapted: bool, controlled: bool) -> NotFiniteError:
    """Return the error for an output with NaN or infinity. `dtype`: see Setup. `adapted`, `controlled`: whether there was a
    LoRA, a ControlNet."""
    advice = []
    if compute_name(dtype) == "fp16":
        advice.append("weight_dtype fp16 overflows in many models: use bf16 or fp32")
    if adapted:
        advice.append("lower the LoRA's strength, or remove it")
    if controlled:
        advice.append("lower the ControlNet's strength")
    if not advice:
        advice.append("use weight_dtype fp32 (of fp8 files another version), or another sampler or scheduler")
    advice.append("download the model's file again if it is damaged")
    return NotFiniteError(
        "Parallel DiT: the model's output has values that are not finite (NaN or infinite), which give a black image. What "
        f"may help: {'; '.join(advice)}."
    )
