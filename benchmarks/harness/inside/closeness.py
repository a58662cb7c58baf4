"""Latents of the bundled model with and without `min_closeness`, for benchmarks/fidelity/closeness.py. Run by serve.py."""

from boot import BUNDLED, Results, comfy, node, parallel, torch
from safetensors.torch import load_file, save_file


def main(
    results: Results, sampler: str, scheduler: str, runs: list, prompts: list, noise: str, out: str, cfg: float
) -> None:
    """`runs`: (steps, bands, asked for in dB); 0 bands for exact calls. `noise`: a file with a picture's under its number.

    Writes `out`: "<steps> <bands> <asked>" -> the latents. Result of the same name: for each picture, expected dB (NaN if
    nothing was judged), and the number of exact model calls.
    """
    plain, noises, made = parallel(BUNDLED, pipe=2), load_file(noise), {}
    for steps, bands, asked in runs:
        model = node("ApplyPipeFusion", plain, bands, 1, True, True, asked) if bands else plain
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), scheduler, steps)
        latents, judged = [], []
        for index, prompt in enumerate(prompts):
            guider = comfy.samplers.CFGGuider(model)
            guider.set_conds(*(node("QuickstartPrompt", text) for text in (prompt, "")))
            guider.set_cfg(cfg)
            x = noises[str(index)]
            with torch.inference_mode():
                chosen = comfy.samplers.sampler_object(sampler)
                latents.append(guider.sample(x, torch.zeros_like(x), chosen, sigmas, disable_pbar=True, seed=1))
            wrappers = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
            for last in (wrapper.last for wrapper in wrappers if hasattr(wrapper, "last")):
                judged.append((last.expected_db, last.exact_calls))
        made[f"{steps} {bands} {asked:g}"] = torch.cat(latents)
        results.case(f"{steps} {bands} {asked:g}", lambda judged=judged: judged)
    save_file(made, out)
