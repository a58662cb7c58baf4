"""Latents of a trained mini model by its family and by ComfyUI's own class, for benchmarks/fidelity. Run by serve.py."""

from functools import partial

from boot import Results, by_own_class, comfy, node, parallel, torch
from safetensors.torch import load_file, save_file


def main(results: Results, file: str, inputs: str, runs: list, own: bool, cfg: float, start: float, out: str) -> None:
    """`inputs`: a file with `noise` [N, ...], latents at the noise level `start`, and with `positive.*` and `negative.*`.
    `runs`: (steps, bands), 0 bands for whole calls. Writes `out`: "<steps> <bands>" -> latents, as the model has them."""
    given, made = load_file(inputs), {}
    load = partial(by_own_class, parallel) if own else parallel
    with torch.inference_mode():
        plain = load(file)
        for steps, bands in runs:
            model = node("ApplyPipeFusion", plain, bands, 1, True) if bands else plain
            latents = [sampled(model, given, index, steps, cfg, start) for index in range(len(given["noise"]))]
            made[f"{steps} {bands}"] = plain.model.process_latent_in(torch.cat(latents))
    save_file(made, out)


def sampled(model, given: dict[str, torch.Tensor], index: int, steps: int, cfg: float, start: float) -> torch.Tensor:
    """One picture or video, in equal steps."""

    def cond(sign: str) -> list:
        names = {name.removeprefix(f"{sign}."): name for name in given if name.startswith(f"{sign}.")}
        entries = {key: given[name][index : index + 1] for key, name in names.items()}
        return [[entries.pop("context"), entries]]

    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(cond("positive"), cond("negative"))
    guider.set_cfg(cfg)
    x = given["noise"][index : index + 1]
    sampler, sigmas = comfy.samplers.sampler_object("euler"), torch.linspace(start, 0, steps + 1)
    return guider.sample(x / start, torch.zeros_like(x), sampler, sigmas, disable_pbar=True, seed=1)
