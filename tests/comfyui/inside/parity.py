"""Parallel DiT Loader's MODEL against ComfyUI's own loader for the same file. Run by serve.py."""

import os
from functools import partial
from unittest.mock import patch

import torch
from boot import (
    Results,
    difference,
    ksampler,
    native_model,
    other_attention,
    parallel,
    random_prompts,
    sequence,
    spawned_ranks,
)

FILE, SD3 = "tiny.safetensors", "tiny-sd3.safetensors"


def main(results: Results) -> None:
    from parallel_backend.client.registry import registry

    native, native_sd3 = native_model(FILE), native_model(SD3)
    both = random_prompts(9, 9)
    piped = parallel(FILE)
    square, odd, one_token = torch.zeros(1, 16, 16, 16), torch.zeros(1, 16, 15, 13), torch.zeros(1, 16, 2, 2)

    def compare(model, latent=square, texts=both, native=native, **settings) -> dict[str, float]:
        expected = ksampler(native, texts, latent, **settings)
        found = ksampler(model, texts, latent, **settings)
        rounding = difference(expected, ksampler(other_attention(native), texts, latent, **settings))
        return {"difference": difference(expected, found), "rounding": rounding}

    results.case("euler cfg 1", partial(compare, piped, cfg=1.0))
    results.case("dpmpp_sde", partial(compare, piped, sampler="dpmpp_sde"))
    results.case("text lengths 9 and 5", partial(compare, piped, texts=random_prompts(9, 5)))
    results.case("odd size", partial(compare, piped, odd))
    results.case("seed 2**63", partial(compare, piped, seed=2**63, steps=2))

    # Other degrees on the same ranks; last, since each of these loads the model again.
    ring = parallel(FILE, pipe=1, config=sequence(ring=2))
    results.case("ring_degree 2", partial(compare, ring, odd))
    # One text token and one of the picture: nothing is left for the second rank.
    results.case("ring_degree 2 one token", partial(compare, ring, one_token, random_prompts(1, 1), steps=1))
    results.case("ring_degree 2 after one token", partial(compare, ring, odd, steps=1))
    displaced = parallel(FILE, pipe=1, config=sequence(1, 1, "displaced", 2, 1000))
    results.case("displaced, all steps warm-up", partial(compare, displaced, odd))
    results.case("displaced one token", partial(compare, displaced, one_token, random_prompts(1, 1), steps=1))
    results.case("SD3, odd size", lambda: compare(parallel(SD3), odd, random_prompts(9, 5), native_sd3, sampler="dpmpp_2m"))
    registry().close()  # ranks on cpu,cpu would serve cpu too
    # Read by Python at a rank's start: it then lists on stderr every module that it imports.
    with spawned_ranks(), patch.dict(os.environ, PYTHONPROFILEIMPORTTIME="1"):
        results.case("one rank", lambda: compare(parallel(FILE, pipe=1, devices="cpu"), steps=2))
