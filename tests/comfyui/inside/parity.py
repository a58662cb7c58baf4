"""Parallel DiT Loader's MODEL against ComfyUI's own loader for the same file. Run by serve.py."""

import os
from functools import partial
from unittest.mock import patch

from boot import BASE, Results, comfy, difference, ksampler, node, other_attention, parallel, sequence, spawned_ranks, torch

SAMPLERS = ("euler", "heun", "dpmpp_2m", "uni_pc", "euler_ancestral", "dpmpp_sde", "lcm")
FILE, SD3 = "tiny.safetensors", "tiny-sd3.safetensors"


def prompts(*lengths: int) -> list:
    """Positive and negative with so many text tokens. Of equal lengths, ComfyUI evaluates them as one batch, else as two."""
    g = torch.Generator().manual_seed(0)
    return [
        [[torch.randn(1, length, 64, generator=g), {"pooled_output": torch.randn(1, 32, generator=g)}]] for length in lengths
    ]


def main(results: Results) -> None:
    from parallel_backend.client.registry import registry

    native, native_sd3 = (
        comfy.sd.load_diffusion_model(
            str(BASE / "models" / "diffusion_models" / name), model_options={"dtype": torch.float32}
        )
        for name in (FILE, SD3)
    )
    both = prompts(9, 9)
    piped = parallel(FILE)
    g = torch.Generator().manual_seed(1)
    square, odd = torch.zeros(1, 16, 16, 16), torch.zeros(1, 16, 15, 13)
    picture = torch.randn(1, 16, 16, 16, generator=g)

    def compare(model, latent=square, texts=both, native=native, **settings) -> dict[str, float]:
        expected = ksampler(native, texts, latent, **settings)
        found = ksampler(model, texts, latent, **settings)
        rounding = difference(expected, ksampler(other_attention(native), texts, latent, **settings))
        return {"difference": difference(expected, found), "rounding": rounding, "largest": float(expected.abs().max())}

    for sampler in SAMPLERS:
        for cfg in (1.0, 3.0):
            results.case(f"{sampler} cfg {cfg:.0f}", partial(compare, piped, sampler=sampler, cfg=cfg))
    results.case("text lengths 9 and 5", partial(compare, piped, texts=prompts(9, 5)))
    results.case("batch 2", partial(compare, piped, torch.zeros(2, 16, 16, 16)))
    results.case("odd size", partial(compare, piped, odd))
    results.case("denoise 0.5", partial(compare, piped, picture, denoise=0.5))
    results.case("seed 2**63", partial(compare, piped, seed=2**63, steps=2))

    def all_warm(piped=piped, **settings) -> dict[str, float]:
        patched = node("ApplyPipeFusion", piped, 4, 1000, True)
        expected = ksampler(piped, both, square, **settings)
        return {"difference": difference(expected, ksampler(patched, both, square, **settings))}

    results.case("all steps warm-up cfg 1", partial(all_warm, cfg=1.0))
    results.case("all steps warm-up cfg 3", partial(all_warm, cfg=3.0))

    # Other degrees on the same ranks; last, since each of these loads the model again.
    uneven = torch.zeros(3, 16, 16, 16)
    split = sequence(ulysses=2)
    results.case("ulysses_degree 2", lambda: compare(parallel(FILE, pipe=1, config=split), odd))
    results.case("split_batch_degree 2", lambda: compare(parallel(FILE, pipe=1, batch=2), uneven, steps=2))
    modes = {
        "ring_degree 2": parallel(FILE, pipe=1, config=sequence(ring=2)),
        "tensor_parallel_degree 2": parallel(FILE, pipe=1, tensor=2),
        "displaced, all steps warm-up": parallel(FILE, pipe=1, config=sequence(1, 1, "displaced", 2, 1000)),
    }
    one_token = torch.zeros(1, 16, 2, 2)
    for name, model in modes.items():
        for cfg in (1.0, 3.0):
            results.case(f"{name} cfg {cfg:.0f}", partial(compare, model, odd, cfg=cfg))
        # One text token and one of the picture: nothing is left for the second rank.
        results.case(f"{name} one token", partial(compare, model, one_token, prompts(1, 1), steps=1))
        results.case(f"{name} after one token", partial(compare, model, odd, steps=1))
    results.case("stage_split 1,4", lambda: compare(parallel(FILE, stage_split="1,4"), odd, steps=2))
    sd3 = parallel(SD3)
    results.case("SD3", partial(compare, sd3, native=native_sd3))
    results.case("SD3 odd size", partial(compare, sd3, odd, texts=prompts(9, 5), native=native_sd3, sampler="dpmpp_2m"))
    results.case("SD3 all steps warm-up", partial(all_warm, sd3))
    results.case("SD3 ulysses_degree 2", lambda: compare(parallel(SD3, pipe=1, config=split), odd, native=native_sd3))
    registry().close()  # ranks on cpu,cpu would serve cpu too
    # Read by Python at a rank's start: it then lists on stderr every module that it imports.
    with spawned_ranks(), patch.dict(os.environ, PYTHONPROFILEIMPORTTIME="1"):
        results.case("one rank", lambda: compare(parallel(FILE, pipe=1, devices="cpu"), steps=2))
