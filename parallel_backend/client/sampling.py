"""Euler sampling of flow matching without ComfyUI, whole and in bands. Used by the quickstart, the benchmarks and tests."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.band_cut import BandCut, packed, unpacked
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows, exact_above
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.step_cache import StepCache
from parallel_backend.own_class.calls.patching import Latents, latents_of, like
from parallel_backend.processes.pool import Poll
from parallel_backend.wire.sampling import RunStats

Predict = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""(x [B, C, H, W], timestep [B], conditioning tensors) -> velocity like x."""


@dataclass(frozen=True)
class Prompt:
    """Conditioning tensors, batch first. If `cfg` is 1, negative ones are not used. `timestep`: the model's timestep at
    sigma 1."""

    positive: dict[str, torch.Tensor]
    negative: dict[str, torch.Tensor]
    cfg: float
    timestep: float = 1.0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the conditioning of a model call: with guidance [negative, positive] as one batch, in ComfyUI's order."""
        if self.cfg == 1.0:
            return self.positive
        return {name: torch.cat((self.negative[name], self.positive[name])) for name in self.positive}


def linear_sigmas(steps: int) -> torch.Tensor:
    """Return sigmas from 1 to 0, [steps + 1]."""
    return torch.linspace(1, 0, steps + 1)


def euler(predict: Predict, x: torch.Tensor, sigmas: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """Return the sample, from x [B, C, H, W] at sigmas[0]."""
    tensors = prompt.tensors()
    for sigma, following in pairwise(sigmas):
        if prompt.cfg == 1.0:
            velocity = predict(x, sigma.repeat(len(x)), tensors)
        else:
            both = predict(torch.cat((x, x)), sigma.repeat(2 * len(x)), tensors)
            negative, positive = both.chunk(2)
            velocity = negative + prompt.cfg * (positive - negative)
        x = x + (following - sigma) * velocity
    return x


def may_forecast(timestep: torch.Tensor, sigmas: torch.Tensor) -> bool:
    """Whether a step cache may answer a call at `timestep` [B]: not in the last step, because no later step corrects
    errors."""
    return float(timestep[0]) > float(sigmas[-2])


def sample_whole(
    model: RemoteTransformer,
    noise: torch.Tensor | Latents,
    sigmas: torch.Tensor,
    prompt: Prompt,
    poll: Poll = lambda: None,
    cache: StepCache | None = None,
) -> torch.Tensor | Latents:
    """Return the sample, by exact calls with the whole latent, except for calls that `cache` forecasts."""
    shapes = tuple(tuple(latent.shape) for latent in latents_of(noise))

    def predict(x, timestep, tensors):
        time, allowed = prompt.timestep * timestep, may_forecast(timestep, sigmas)
        call = ModelCall(unpacked(x, shapes), time, tensors, may_forecast=allowed)
        return packed(latents_of(model.predict(call, poll, cache=cache)))

    return like(noise, unpacked(euler(predict, packed(latents_of(noise)), sigmas, prompt), shapes))


def sample_in_bands(
    model: RemoteTransformer,
    noise: torch.Tensor | Latents,
    sigmas: torch.Tensor,
    prompt: Prompt,
    bands: int,
    warm_up: int,
    poll: Poll = lambda: None,
    extrapolate: bool = True,
    overlap: bool = True,
    cache: StepCache | None = None,
    along: str = "rows",
) -> tuple[torch.Tensor | Latents, list[RunStats]]:
    """Return (the sample by PipeFusion in `bands` bands, each rank's statistics). The first `warm_up` steps are exact. With
    displaced patches `bands` is 1, because the model's degrees cut the tokens."""
    patching, latents = model.built.patching.cut(along), latents_of(noise)
    shapes = tuple(tuple(latent.shape) for latent in latents)
    companion_tokens = patching.companion_tokens(shapes)
    text = model.built.text_tokens(companion_tokens, prompt.positive)
    cut = BandCut(patching, cut_rows(shapes[0], bands, patching, text), shapes)
    run = BandedRun(model, cut.rows, shapes[0], warm_up > 0, overlap, extrapolate, cache, poll, along, companion_tokens)
    limit = exact_above(sigmas, warm_up)

    def sample(band: int) -> torch.Tensor:
        def predict(x, timestep, tensors):
            exact, allowed = float(timestep[0]) > limit, may_forecast(timestep, sigmas)
            band_latents = unpacked(x, cut.shapes_of(band))
            call = ModelCall(band_latents, prompt.timestep * timestep, tensors, may_forecast=allowed)
            return packed(latents_of(run.predict(band, call, exact)))

        return euler(predict, cut.band(packed(latents), band), sigmas, prompt)

    try:
        parts = run_bands(run, sample, lambda: None, poll)
    except BaseException:
        model.discard_run(run.run)
        raise
    return like(noise, unpacked(cut.whole(parts), shapes)), model.close_run(run.run, poll)
