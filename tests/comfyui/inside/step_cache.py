"""Parallel Step Cache in front of ComfyUI's samplers. Run by serve.py."""

import logging
from functools import partial

from boot import BUNDLED, Results, difference, ksampler, node, outputs_of, parallel, sequence, torch

STEPS = 12
THRESHOLD = 0.2  # at 12 steps; noisy samplers need more


def main(results: Results) -> None:
    from parallel_backend.client import step_cache

    log: list[str] = []
    ask = step_cache.StepCache.call

    def call(self, *arguments):
        entry = ask(self, *arguments)
        log.append("." if isinstance(entry, step_cache.Forecast) else "#")
        return entry

    step_cache.StepCache.call = call
    prompts = [node("QuickstartPrompt", text) for text in ("3 1 4 1", "")]
    others = [node("QuickstartPrompt", text) for text in ("2 7", "")]
    empty = torch.zeros(1, 16, 16, 16)
    plain = parallel(BUNDLED)

    def cache(model, threshold: float = THRESHOLD, start: float = 0.0, end: float = 1.0):
        return node("ParallelStepCache", model, threshold, start, end)

    def banded(model):
        return node("ApplyPipeFusion", model, 3, 1, True)

    def run(model, texts=prompts, sampler: str = "euler", steps: int = STEPS, **named) -> tuple[torch.Tensor, str]:
        log.clear()
        return ksampler(model, texts, empty, sampler, steps, **named), "".join(log)

    def against(uncached, cached, **named) -> dict:
        """Twice with another prompt's run in between, beside the uncached run."""
        exact, none = run(uncached, **named)
        first, decided = run(cached, **named)
        run(cached, others, **named)
        second, again = run(cached, **named)
        return {
            "finite": bool(first.isfinite().all()),
            "uncached decisions": none,
            "decisions": decided,
            "same decisions": decided == again,
            "repeat": difference(first, second),
            "relative": float((first - exact).norm() / exact.norm()),
        }

    results.case("euler", partial(against, plain, cache(plain)))
    results.case("bands", partial(against, banded(plain), cache(banded(plain))))
    results.case("percents", lambda: {"decisions": run(cache(plain, 3.0, 0.4, 0.7))[1]})
    results.case(
        "off",
        lambda: {
            "difference": difference(run(plain)[0], run(cache(cache(plain), 0.0))[0]),
            "decisions": run(cache(cache(plain), 0.0))[1],
        },
    )

    def reported() -> dict:
        settings = (42, STEPS, 3.0, "euler", "simple", *prompts, {"samples": empty}, 1.0, 3, 1, True, True, THRESHOLD)
        log.clear()
        latent, report = outputs_of("PipeFusionSampler", plain, *settings)
        decided = "".join(log)
        own, _ = run(cache(banded(plain)))
        return {"report": report, "decisions": decided, "difference": difference(own, latent["samples"])}

    results.case("report", reported)
    results.case("adaptive in bands", lambda: {"decisions": run(cache(banded(plain), 1.5), sampler="dpm_adaptive")[1]})
    logging.getLogger().setLevel(logging.ERROR)
    displaced = parallel(BUNDLED, pipe=1, config=sequence(1, 1, "displaced", 2), stage_split="even")
    results.case("displaced", partial(against, displaced, cache(displaced)))
