"""LoRA files put on ComfyUI's own model and on ours, one after the other; what came of each. Run by serve.py."""

from typing import Any

from boot import Results, difference, ksampler, node, parallel, torch

from parallel_backend.client.not_finite import NotFiniteError
from parallel_backend.client.registry import registry
from parallel_backend.processes.pool import RankError

STEPS = 2


def main(results: Results, model: str, files: list[tuple[str, float]]) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [
        [[torch.randn(1, 5, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator)}]]
        for _ in range(2)
    ]
    latent = {"samples": torch.zeros(1, 16, 4, 4)}
    native, ours = node("UNETLoader", model, "default"), parallel(model, stage_split="even")

    def sampled(base: Any, file: str, strength: float) -> torch.Tensor:
        return ksampler(node("LoraLoaderModelOnly", base, file, strength), prompts, latent, steps=STEPS)

    def trial(file: str, strength: float) -> dict[str, Any]:
        alive = registry().pool.pids
        try:
            theirs, found = sampled(native, file, strength), {"rank": False, "far": None}
        except Exception as error:  # whatever ComfyUI makes of it
            theirs = None
            found = {"rank": False, "far": None, "theirs": f"{type(error).__name__}: {error}"[:300]}
        try:
            mine = sampled(ours, file, strength)
            if theirs is not None:
                far = difference(mine, theirs) / max(1.0, float(theirs.abs().max()))
                found["far"] = far if theirs.isfinite().all() else None
        except Exception as error:
            found |= {"kind": type(error).__name__, "text": str(error), "cause": str(error.__cause__ or "")}
            found["not finite"] = isinstance(error, NotFiniteError)
            found["rank"] = isinstance(error, RankError)
        found["lives"] = registry().pool is not None and registry().pool.pids == alive
        return found

    with torch.inference_mode():
        expected = ksampler(ours, prompts, latent, steps=STEPS)
        for file, strength in files:
            results.case(file, lambda file=file, strength=strength: trial(file, strength))
        results.case("as before", lambda: difference(expected, ksampler(ours, prompts, latent, steps=STEPS)))
