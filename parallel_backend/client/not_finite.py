"""Checks inputs for NaN and infinity, and explains an output with such values. For the explanation, ranks are asked which
weights and LoRAs have such values."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch

from parallel_backend.core.dtypes import compute_name
from parallel_backend.core.finite import NAMED, all_finite
from parallel_backend.core.setup import Setup
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import RankError
from parallel_backend.wire.diagnosis import FindNotFinite, NotFiniteFound

from .call import PostedCall, fail
from .lora import Adaptation


class NotFiniteError(RuntimeError):
    """Raised if the model's output has NaN or infinity. The run ends, and the ranks stay."""


def check_latent(x: torch.Tensor, timestep: torch.Tensor) -> None:
    """Raise ValueError, naming the sampler's input, if values of a call are NaN or infinite."""
    if not all_finite(timestep):
        raise ValueError("sigmas: they have values that are not finite (NaN or infinite). Use another scheduler.")
    if not all_finite(x):
        raise ValueError(
            "latent_image: the sampler gave the model a latent with values that are not finite (NaN or infinite), at "
            f"the model's time {float(timestep.max()):.4g}. If this is the first step, check the node before the "
            "sampler. Later, the sampler made them: lower cfg, or use another sampler or scheduler."
        )


def check_conditioning(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if conditioning tensors have NaN or infinity. Masks of scores may have them."""
    for name, tensor in tensors.items():
        if "mask" not in name and not all_finite(tensor):
            raise ValueError(
                f"positive, negative: the conditioning's '{name}' holds values that are not finite (NaN or infinite). "
                "Check the text encoder, its file and dtype, and the nodes that change the conditioning."
            )


def explanation(
    answers: Sequence[NotFiniteFound], dtype: str, adapted: bool, controlled: bool, in_file: Mapping[str, str]
) -> str:
    """Return the error's text. `dtype`: see Setup. `adapted`, `controlled`: whether there was a LoRA, a ControlNet.
    `in_file`: parameter -> its key in the file, by which ComfyUI and LoRA files name it."""
    weights, adapters = (
        list(dict.fromkeys(in_file.get(name, name) for names in found for name in names))
        for found in zip(*((answer.weights, answer.adapters) for answer in answers), strict=True)
    )
    text = "Parallel DiT: the model's output has values that are not finite (NaN or infinite), which give a black image. "
    if adapters:
        return f"{text}The LoRA's own values are not finite in {_layers(adapters)}: remove it."
    if weights:
        small = "weight_dtype fp16 is too small for them: use bf16 or fp32; or " if compute_name(dtype) == "fp16" else ""
        return (
            f"{text}The model's own weights are not finite in {', '.join(weights[:NAMED])}: {small}the file is damaged, "
            "download it again."
        )
    advice = []
    if compute_name(dtype) == "fp16":
        advice.append("weight_dtype fp16 overflows in many models: use bf16 or fp32")
    if adapted:
        advice.append("lower the LoRA's strength")
    if controlled:
        advice.append("lower the ControlNet's strength")
    if not advice:
        advice.append("use weight_dtype fp32 (of fp8 files another version), or another sampler or scheduler")
    return f"{text}What may help: {'; '.join(advice)}."


def _layers(keys: Sequence[str]) -> str:
    return ", ".join(key.removesuffix(".weight") for key in keys[:NAMED])


class CauseSearch:
    """Fails calls whose output is not finite, with an error that says what to change."""

    def __init__(self, ranks: ModelRanks, setup: Setup, adaptation: Adaptation, in_file: Mapping[str, str]):
        """`in_file`: see `explanation`."""
        self._ranks, self._setup, self._adaptation, self._in_file = ranks, setup, adaptation, in_file

    def fail(self, call: PostedCall) -> None:
        """Fail a call whose output is not finite. Returns at once; `call.future` fails later."""

        def end(asked: Future) -> None:
            error = asked.exception()
            if error is None:
                adapted, controlled = self._adaptation.present, bool(call.residuals)
                dtype = self._setup.dtype
                error = NotFiniteError(explanation(asked.result(), dtype, adapted, controlled, self._in_file))
            fail(call.future, error)

        try:
            self._ranks.ask(FindNotFinite(), NotFiniteFound).add_done_callback(end)
        except RankError as error:
            fail(call.future, error)
