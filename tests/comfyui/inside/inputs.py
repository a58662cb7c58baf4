"""Latents, prompts and LoRA strengths that no node should give, under ComfyUI's KSampler. Run by serve.py.

Property: what the native MODEL gives, or a ValueError that begins with an input's name, and the ranks live on either way.
"""

import copy
import math
from typing import Any

from boot import Results, difference, ksampler, node, parallel, torch

FILE = "tiny.safetensors"
STEPS = 3
NAMES = ("latent_image", "positive, negative", "model")
"""Of inputs by which it is refused."""


def latents() -> list[Any]:
    """Of the tiny model, whose own have 16 channels; the first ones can be sampled."""
    zeros = torch.zeros
    odd = [
        *(zeros(1, 16, 1, 1), zeros(1, 16, 3, 5), zeros(2, 16, 2, 7), torch.randn(1, 16, 4, 4), zeros(1, 16, 4, 4).double()),
        *(zeros(1, 16, 4, 4).half(), zeros(1, 4, 4, 4), zeros(1, 16, 1, 4, 4), zeros(0, 16, 4, 4), zeros(1, 16, 0, 4)),
        *(zeros(16, 4, 4), zeros(()), zeros(1, 16, 4, 4, dtype=torch.int64), torch.full((1, 16, 4, 4), math.nan)),
    ]
    return [*({"samples": samples} for samples in odd), {"samples": [1]}, {}]


def conditionings(g: torch.Generator) -> list[Any]:
    def of(tokens: int, width: int = 64, pooled: int | None = 32, batch: int = 1, **more: Any) -> list[Any]:
        extras = {} if pooled is None else {"pooled_output": torch.randn(batch, pooled, generator=g)}
        return [[torch.randn(batch, tokens, width, generator=g), extras | more]]

    return [
        *(of(9), of(1), of(1_000), of(0), of(9, 63), of(9, 64, 31), of(9, 64, None), of(9, batch=3), of(5) + of(7), []),
        *([[]], [[torch.zeros(1, 9, 64)]], [[None, {}]], "a text", [["a", {}]], [[torch.zeros(9, 64), {}]]),
        *(of(9, area=(1, 1, 0, 0)), of(9, strength=math.nan)),
    ]


def main(results: Results) -> None:
    from parallel_backend.client.not_finite import NotFiniteError
    from parallel_backend.client.registry import registry

    g = torch.Generator().manual_seed(0)
    model, native = parallel(FILE, stage_split="even"), node("UNETLoader", FILE, "default")
    prompts = [conditionings(g)[0] for _ in range(2)]
    sound = {"samples": torch.zeros(1, 16, 4, 4)}
    with torch.inference_mode():
        expected = ksampler(model, prompts, sound, steps=STEPS)

    def outcome(latent: Any, pair: Any) -> str:
        try:
            theirs = ksampler(native, pair, copy.copy(latent), steps=STEPS)
        except Exception:
            theirs = None
        try:
            ours = ksampler(model, pair, copy.copy(latent), steps=STEPS)
        except ValueError as error:
            if str(error).startswith(NAMES):
                return "refused"
            assert theirs is None, f"{latent} {error}"
            return "refused by ComfyUI"
        except Exception as error:
            assert theirs is None and "rank" not in str(error), error
            return "refused by ComfyUI"
        if theirs is not None and theirs.isfinite().all():
            assert difference(ours, theirs) <= 1e-3 * max(1.0, float(theirs.abs().max()))
        return "done"

    def odd() -> dict[str, int]:
        alive = registry().pool.pids
        given = [*((latent, prompts) for latent in latents()), *((sound, (each, prompts[1])) for each in conditionings(g))]
        outcomes = [outcome(latent, pair) for latent, pair in given]
        assert registry().pool.pids == alive
        return {each: outcomes.count(each) for each in ("done", "refused", "refused by ComfyUI")}

    def strengths() -> dict[str, str]:
        """A LoRA of strengths that no widget gives."""
        patch = {"diffusion_model.img_in.weight": ("diff", (torch.ones(256, 64),))}
        found = {}
        for strength in (math.nan, math.inf, 0.0, 1e30):
            patched = model.clone()
            try:
                patched.add_patches(patch, strength)
                ksampler(patched, prompts, sound, steps=STEPS)
                found[str(strength)] = "done"
            except (ValueError, NotFiniteError) as error:
                found[str(strength)] = str(error)[:80]
        return found

    for case in (odd, strengths):
        results.case(case.__name__, case)
        results.case(f"after {case.__name__}", lambda: difference(expected, ksampler(model, prompts, sound, steps=STEPS)))
