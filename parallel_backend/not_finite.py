"""NaN and infinity: found where they are cheap to see, and traced to the rank where they began.

A rank adds up what each micro-step hands on, without waiting for the device; nobody looks at the sums until the client has
found an output that is not finite.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from .config import Degrees
from .linear import RankLinear
from .messages import NotFiniteFound

KEPT = 256
"""Micro-steps that a rank can still tell about: many more than are under way."""
NAMED = 3
"""Tensors that are named at most."""


class NotFiniteError(RuntimeError):
    """The model's output is not finite. The run is over, the ranks live on."""


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Not finite if one of them is not. Finite ones overflow fp16; the other types have float32's range, or more."""
    return values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)


def all_finite(tensor: torch.Tensor) -> bool:
    """No NaN and no infinity in it. One pass where that is so: the sum of finite values hardly ever overflows float32."""
    if not tensor.is_floating_point() or bool(_sum(tensor).isfinite()):
        return True
    return bool(tensor.isfinite().all())


def check_latent(x: torch.Tensor, timestep: torch.Tensor) -> None:
    """Of a model call. ValueError, in the words of a sampler's inputs."""
    if not all_finite(timestep):
        raise ValueError("sigmas: they hold values that are not finite (NaN or infinite). Use another scheduler.")
    if not all_finite(x):
        raise ValueError(
            "latent_image: the latent that the sampler gives the model holds values that are not finite (NaN or infinite), "
            f"at the model's time {float(timestep.max()):.4g}. At the first step it came so: look at the node before the "
            "sampler. Later on the sampler made it so: lower cfg, or use another sampler or scheduler."
        )


def check_conditioning(tensors: Mapping[str, torch.Tensor]) -> None:
    """ValueError for values that are not finite; in a mask of scores they may be."""
    for name, tensor in tensors.items():
        if "mask" not in name and not all_finite(tensor):
            raise ValueError(
                f"positive, negative: the conditioning's '{name}' holds values that are not finite (NaN or infinite). Look "
                "at the text encoder, its file and dtype, and at the nodes that change the conditioning."
            )


class FiniteWatch:
    """The sums of a rank's last results."""

    def __init__(self):
        self._sums: deque[tuple[int, torch.Tensor]] = deque(maxlen=KEPT)

    def note(self, seq: int, result: torch.Tensor) -> None:
        """Of micro-step `seq`: what is sent on, or the output. Never waits for the device."""
        self._sums.append((seq, _sum(result)))

    def first(self) -> int | None:
        """The first of them that was not finite. They are forgotten: what comes later has a beginning of its own."""
        sums, self._sums = self._sums, deque(maxlen=KEPT)
        return next((seq for seq, total in sums if not bool(total.isfinite())), None)


def bad_weights(model: nn.Module) -> tuple[str, ...]:
    """The first few parameters with values that are not finite; packed ones are not looked into."""
    return _first(name for name, parameter in model.named_parameters() if not all_finite(parameter))


def bad_adapters(model: nn.Module) -> tuple[str, ...]:
    """The first few layers with such an adapter."""
    return _first(
        name
        for name, module in model.named_modules()
        if isinstance(module, RankLinear)
        and not all(all_finite(factor) for pair in module.adapters for factor in pair if factor is not None)
    )


def _first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(itertools.islice(names, NAMED))


def explanation(
    found: Sequence[NotFiniteFound],
    seq: int,
    degrees: Degrees,
    devices: Sequence[str],
    dtype: str,
    adapted: bool,
    controlled: bool,
) -> str:
    """What to tell the user. `found`: by rank; `seq`: the micro-step whose output was not finite; `adapted`, `controlled`:
    there was a LoRA, a ControlNet.
    """
    first = min(
        ((answer.seq, degrees.coordinate(answer.rank).pipe) for answer in found if answer.seq is not None),
        default=(seq, degrees.pipe - 1),
    )
    origin = [answer for answer in found if (answer.seq, degrees.coordinate(answer.rank).pipe) == first]
    bad = [answer for answer in found if answer.weights or answer.adapters]
    named = [answer for answer in origin if answer in bad] or origin
    where = " and ".join(f"rank {answer.rank} ({devices[answer.rank]})" for answer in named) or "the last stage"
    stage = f", stage {first[1] + 1} of {degrees.pipe}," if degrees.pipe > 1 else ""
    weights = [name for answer in bad for name in answer.weights]
    adapters = [name for answer in bad for name in answer.adapters]
    text = (
        "Parallel DiT: the model's output holds values that are not finite (NaN or infinite), which would be a black "
        f"picture. They began on {where}{stage} in micro-step {first[0]}. "
    )
    if adapters:
        return f"{text}The LoRA's own values are not finite in {', '.join(adapters[:NAMED])}: remove it."
    if weights:
        small = "weight_dtype fp16 is too small for them, use bf16 or fp32; or " if dtype == "fp16" else ""
        return (
            f"{text}The model's own weights are not finite in {', '.join(weights[:NAMED])}: {small}the file is damaged, "
            "download it again."
        )
    advice = []
    if dtype == "fp16":
        advice.append("weight_dtype fp16 overflows in many models: use bf16 or fp32")
    if adapted:
        advice.append("lower the LoRA's strength")
    if controlled:
        advice.append("lower the ControlNet's strength")
    if not advice:
        advice.append("use weight_dtype fp32 (of fp8 files another version), or another sampler or scheduler")
    return f"{text}What may help: {'; '.join(advice)}."
