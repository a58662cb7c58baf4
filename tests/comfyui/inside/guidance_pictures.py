"""Latents of the bundled model under a node or guider of guidance_in_bands.py, for benchmarks/fidelity. Run by serve.py.

One picture at a time, as KSampler gives it; with split_batch, since what a band sees depends on the number of bands alone.
"""

from pathlib import Path

import guidance_in_bands as table
from boot import BUNDLED, Results, comfy, node, parallel, torch
from safetensors.torch import load_file, save_file


def main(
    results: Results, name: str, runs: list, prompts: list, noise: str, out: str, cfg: float, packs: str | None
) -> None:
    """`runs`: (steps, bands), 0 bands for calls that are whole. `noise`: a file with a picture's under its number.

    Writes `out`: "<steps> <bands>" -> the latents. Case "warnings": what was said.
    """
    if packs is not None:
        table.load_packs(Path(packs))
    nodes = table.PIXEL_WISE | table.WHOLE | table.PACKS_PIXEL_WISE | table.PACKS_WHOLE
    plain = nodes.get(name, lambda model: model)(parallel(BUNDLED, pipe=1, batch=2))
    noises, made = load_file(noise), {}
    for steps, bands in runs:
        model = node("ApplyPipeFusion", plain, bands, 1, True) if bands else plain
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
        latents = []
        for index, prompt in enumerate(prompts):
            guider = table.guider_of(model, name, steps, (prompt, "", "7"), cfg)
            x = noises[str(index)]
            with torch.inference_mode():
                sampler = comfy.samplers.sampler_object("euler")
                latents.append(guider.sample(x, torch.zeros_like(x), sampler, sigmas, disable_pbar=True, seed=1))
        made[f"{steps} {bands}"] = torch.cat(latents)
    save_file(made, out)
