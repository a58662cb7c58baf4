"""Noise that samplers draw between steps. It is drawn for the whole latent, and each band gets its rows of it."""

import threading
from collections.abc import Callable

import comfy.k_diffusion.sampling
import comfy.samplers
import torch

from parallel_backend.client.pipefusion.band_cut import BandCut

from ..ui.other_nodes import name_of
from .known_samplers import innermost, options_of

NoiseSampler = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""ComfyUI's noise sampler: sigma, next sigma -> noise."""


class WholeNoise:
    """Noise of the whole latent, drawn once for all bands. Each band takes its rows of it, on the host.

    `draw` draws on the device on which ComfyUI would, because another device's generator gives other noise. Sigmas are on
    the host, because a Brownian tree reads them there.
    """

    def __init__(self, draw: NoiseSampler):
        self._draw, self._lock = draw, threading.Lock()
        self._drawn: list[torch.Tensor] = []

    def band(self, cut: BandCut, index: int) -> NoiseSampler:
        """Return the noise sampler of one band. Every band makes the same draws in the same order."""
        count = 0

        def sample(sigma, sigma_next):
            nonlocal count
            with self._lock:
                if len(self._drawn) == count:
                    self._drawn.append(self._draw(sigma, sigma_next).cpu())
                noise = self._drawn[count]
            count += 1
            return cut.band(noise, index).clone()

        return sample


def whole_noise(sampler: comfy.samplers.KSAMPLER, noise: torch.Tensor, sigmas: torch.Tensor, seed: int | None) -> WholeNoise:
    """The noise that `sampler` would draw for the whole latent `noise`: by its option, a Brownian tree, or plain noise.

    The default is k_diffusion's (comfy/k_diffusion/sampling.py): a tree for the dpmpp *_sde samplers, on the CPU unless
    their name ends in _gpu.
    """
    sampler = innermost(sampler)
    if (noise_sampler := options_of(sampler).get("noise_sampler")) is not None:
        return WholeNoise(noise_sampler)
    name = name_of(sampler.sampler_function).rpartition(".")[2]
    if name.startswith("sample_dpmpp") and "_sde" in name:
        low, high = sigmas[sigmas > 0].min(), sigmas.max()
        cpu = not name.endswith("_gpu")
        tree = comfy.k_diffusion.sampling.BrownianTreeNoiseSampler(noise, low, high, seed=seed, cpu=cpu)
        return WholeNoise(tree)
    return WholeNoise(comfy.k_diffusion.sampling.default_noise_sampler(noise, seed=seed))
