"""NaN and infinity: checks of inputs and outputs, and the search for the rank where such values began.

Each rank sums up the output of each micro-step on its device, without waiting for the sum. Only if an output is not finite
does the client ask the ranks for their sums.
"""

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
    """The model's output is not finite. The run ends; the ranks go on."""


def check_latent(x: torch.Tensor, timestep: torch.Tensor) -> None:
    """ValueError for values of a call that are not finite, naming the sampler's inputs."""
    if not all_finite(timestep):
        raise ValueError("sigmas: they hold values that are not finite (NaN or infinite). Use another scheduler.")
    if not all_finite(x):
        raise ValueError(
            "latent_image: the latent that the sampler gives the model holds values that are not finite (NaN or infinite), "
            f"at the model's time {float(timestep.max()):.4g}. At the first step it came so: look at the node before the "
            "sampler. Later on the sampler made it so: lower cfg, or use another sampler or scheduler."
        )


def check_conditioning(tensors: Mapping[str, torch.Tensor]) -> None:
    """ValueError for values that are not finite. Masks of scores may have such values."""
    for name, tensor in tensors.items():
        if "mask" not in name and not all_finite(tensor):
            raise ValueError(
                f"positive, negative: the conditioning's '{name}' holds values that are not finite (NaN or infinite). Look "
                "at the text encoder, its file and dtype, and at the nodes that change the conditioning."
            )


def explanation(
    answers: Sequence[NotFiniteFound],
    seq: int,
    setup: Setup,
    adapted: bool,
    controlled: bool,
    in_file: Mapping[str, str],
) -> str:
    """The error's text. `seq`: the micro-step of the output. `adapted`, `controlled`: there was a LoRA, a ControlNet.

    `in_file`: parameter -> its key in the file, by which ComfyUI and LoRA files name it.
    """
    degrees, devices, dtype = setup.degrees, setup.devices, setup.dtype
    first = min(
        ((answer.seq, degrees.coordinate(answer.rank).pipe) for answer in answers if answer.seq is not None),
        default=(seq, degrees.pipe - 1),
    )
    origin = [answer for answer in answers if (answer.seq, degrees.coordinate(answer.rank).pipe) == first]
    bad = [answer for answer in answers if answer.weights or answer.adapters]
    named = [answer for answer in origin if answer in bad] or origin
    where = " and ".join(f"rank {answer.rank} ({devices[answer.rank]})" for answer in named) or "the last stage"
    stage = f", stage {first[1] + 1} of {degrees.pipe}," if degrees.pipe > 1 else ""
    weights, adapters = (
        list(dict.fromkeys(in_file.get(name, name) for names in found for name in names))
        for found in zip(*((answer.weights, answer.adapters) for answer in answers), strict=True)
    )
    text = (
        "Parallel DiT: the model's output holds values that are not finite (NaN or infinite), which would be a black "
        f"picture. They began on {where}{stage} in micro-step {first[0]}. "
    )
    if adapters:
        return f"{text}The LoRA's own values are not finite in {_layers(adapters)}: remove it."
    if weights:
        small = "weight_dtype fp16 is too small for them, use bf16 or fp32; or " if compute_name(dtype) == "fp16" else ""
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
    """Fails calls whose output is not finite, with an error that says where the values began."""

    def __init__(self, ranks: ModelRanks, setup: Setup, adaptation: Adaptation, in_file: Mapping[str, str]):
        """`in_file`: see `explanation`."""
        self._ranks, self._setup, self._adaptation, self._in_file = ranks, setup, adaptation, in_file

    def fail(self, call: PostedCall, seq: int, first_seq: int) -> None:
        """Fail a call whose micro-step `seq` gave values that are not finite. Returns at once; `call.future` fails later.

        Within a run the values may have begun in an earlier call, whose K/V this call read. Outside of a run they began in
        the call's micro-steps, which are numbered from `first_seq` on.
        """

        def end(asked: Future) -> None:
            error = asked.exception()
            if error is None:
                adapted, controlled = self._adaptation.present, bool(call.residuals)
                error = NotFiniteError(explanation(asked.result(), seq, self._setup, adapted, controlled, self._in_file))
            fail(call.future, error)

        try:
            question = FindNotFinite(call.run, 0 if call.run else first_seq)
            self._ranks.ask(question, NotFiniteFound).add_done_callback(end)
        except RankError as error:
            fail(call.future, error)
