"""A LoRA file put on ComfyUI's own model and on ours; what came of it. Run by serve.py."""

from typing import Any

from boot import Results, difference, ksampler, node, parallel, torch

from parallel_backend.client.not_finite import NotFiniteError
from parallel_backend.client.registry import registry

STEPS = 2


def main(results: Results, model: str, file: str, strength: float) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [
        [[torch.randn(1, 5, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator)}]]
        for _ in range(2)
    ]
    latent = {"samples": torch.zeros(1, 16, 4, 4)}
    native, ours = node("UNETLoader", model, "default"), parallel(model, stage_split="even")

    def sampled(base: Any) -> torch.Tensor:
        return ksampler(node("LoraLoaderModelOnly", base, file, strength), prompts, latent, steps=STEPS)

    def trial() -> dict[str, Any]:
        alive, found = registry().pool.pids, {"far": None}
        try:
            theirs = sampled(native)
        except Exception as error:  # whatever ComfyUI makes of it
            theirs, found["theirs"] = None, f"{type(error).__name__}: {error}"[:300]
        try:
            mine = sampled(ours)
            if theirs is not None and theirs.isfinite().all():
                found["far"] = difference(mine, theirs) / max(1.0, float(theirs.abs().max()))
        except Exception as error:
            found |= {"kind": type(error).__name__, "text": str(error), "cause": str(error.__cause__ or "")}
            found["not finite"] = isinstance(error, NotFiniteError)
        found["lives"] = registry().pool is not None and registry().pool.pids == alive
        return found

    with torch.inference_mode():
        expected = ksampler(ours, prompts, latent, steps=STEPS)
        results.case("with it", trial)
        results.case("as before", lambda: difference(expected, ksampler(ours, prompts, latent, steps=STEPS)))
