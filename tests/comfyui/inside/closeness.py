"""min_closeness of Apply PipeFusion on the bundled model. Run by serve.py."""

import math
from functools import partial

from boot import BUNDLED, Results, comfy, difference, ksampler, node, parallel, sequence, torch

STEPS, PATCHES = 8, 4


def main(results: Results) -> None:
    prompts = [node("QuickstartPrompt", text) for text in ("3 1 4 1", "")]
    empty = torch.zeros(1, 16, 32, 32)
    piped, displaced = parallel(BUNDLED), parallel(BUNDLED, pipe=1, config=sequence(1, 1, "displaced", 2))

    def asked(plain, closeness: float, put=lambda model: model, patches=PATCHES, **named) -> dict:
        model = put(node("ApplyPipeFusion", plain, patches, 1, True, True, closeness))
        exact = ksampler(piped, prompts, empty, steps=STEPS, **named)
        made = ksampler(model, prompts, empty, steps=STEPS, **named)
        kind = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE
        last = next(wrapper.last for wrapper in model.get_all_wrappers(kind) if hasattr(wrapper, "last"))
        error = float((made - exact).square().mean().sqrt())
        return {
            "difference": difference(made, exact) / float(exact.abs().max()),
            "true": 20 * math.log10(float(exact.std()) / max(error, 1e-12)),
            "expected": last.expected_db,
            "patches": last.bands,
            "exact calls": last.exact_calls,
            "report": str(last),
        }

    results.case("25 dB, euler", partial(asked, piped, 25.0))
    results.case("25 dB, heun", partial(asked, piped, 25.0, sampler="heun"))
    results.case("99 dB, PipeFusion", partial(asked, piped, 99.0))
    results.case("99 dB, displaced", partial(asked, displaced, 99.0))
    results.case("step cache", partial(asked, piped, 25.0, lambda model: node("ParallelStepCache", model, 0.2, 0.0, 1.0)))
    results.case("one patch", partial(asked, piped, 25.0, patches=1))
    results.case("one rank", partial(asked, parallel(BUNDLED, pipe=1, devices="cpu"), 25.0))
