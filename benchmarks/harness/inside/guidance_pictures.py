"""Latents of the bundled model under a node or guider of guidance_nodes.py or guidance_packs.py, or by a sampler, for
benchmarks/fidelity.
Run by serve.py.

One picture at a time, as KSampler gives it.
"""

from pathlib import Path

import guidance_nodes
import guidance_packs
from boot import BUNDLED, Results, comfy, node, parallel, torch
from comfy_extras.nodes_advanced_samplers import SamplerEulerCFGpp
from safetensors.torch import load_file, save_file

PACKS = ("ComfyUI-Detail-Daemon", "ComfyUI-bleh", "RES4LYF")
"""Folders of the packs that `sampler_of` has samplers of."""


def sampler_of(name: str) -> comfy.samplers.KSAMPLER:
    """One of KSampler's list, or a pack's node with its inputs as they are at first."""
    euler = comfy.samplers.sampler_object("euler")
    match name:
        case "Detail Daemon":
            inputs = {
                "detail_amount": 0.1,
                "start": 0.2,
                "end": 0.8,
                "bias": 0.5,
                "exponent": 1.0,
                "cfg_scale_override": 0.0,
            }
            offsets = {"start_offset": 0.0, "end_offset": 0.0, "fade": 0.0, "smooth": True}
            return node("DetailDaemonSamplerNode", sampler=euler, **inputs, **offsets)
        case "Lying Sigma":
            inputs = {"dishonesty_factor": -0.05, "start_percent": 0.1, "end_percent": 0.9}
            return node("LyingSigmaSampler", sampler=euler, **inputs)
        case "Euler CFG++, alternative":
            return SamplerEulerCFGpp.execute("alternative").args[0]
    return comfy.samplers.sampler_object(name)


def main(
    results: Results,
    name: str,
    runs: list,
    prompts: list,
    noise: str,
    out: str,
    cfg: float,
    packs: str | None,
    sampler: str | None = None,
) -> None:
    """`runs`: (steps, bands), 0 bands for calls that are whole. `noise`: a file with a picture's under its number.

    `sampler`: see sampler_of; None: Euler's method. Writes `out`: "<steps> <bands>" -> the latents.
    """
    if packs is not None:
        guidance_packs.load_packs(Path(packs), guidance_packs.PACKS if sampler is None else PACKS)
    own, others = (module.PIXEL_WISE | module.WHOLE for module in (guidance_nodes, guidance_packs))
    plain = (own | others).get(name, lambda model: model)(parallel(BUNDLED, pipe=2))
    noises, made = load_file(noise), {}
    for steps, bands in runs:
        model = node("ApplyPipeFusion", plain, bands, 1, True) if bands else plain
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
        latents = []
        for index, prompt in enumerate(prompts):
            guider = guidance_packs.guider_of(model, name, steps, (prompt, "", "7"), cfg)
            x = noises[str(index)]
            with torch.inference_mode():
                chosen = sampler_of(sampler or "euler")
                latents.append(guider.sample(x, torch.zeros_like(x), chosen, sigmas, disable_pbar=True, seed=1))
        made[f"{steps} {bands}"] = torch.cat(latents)
    save_file(made, out)
