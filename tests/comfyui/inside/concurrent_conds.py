"""Prompts that ComfyUI cannot join to one model call, with one and two replicas. Run by serve.py."""

from collections.abc import Callable
from functools import partial

from boot import BUNDLED, Results, Told, comfy, difference, ksampler, native_model, node, parallel, torch
from small_cases import small
from small_models import latent as latent_of
from small_models import prompts as prompts_of

from parallel_backend.client.registry import registry
from parallel_backend.client.reports.trace import to_spans
from parallel_backend.wire.timeline_kinds import WORK

NAME, STEPS = "qwen-image", 3
CALCULATE = comfy.patcher_extension.WrappersMP.CALC_COND_BATCH


def shortened(prompt: list, tokens: int) -> list:
    """The prompt with its first `tokens` tokens only."""
    (text, extras), *others = prompt
    return [[text[:, :tokens], extras], *others]


def one_by_one(model):
    """The same MODEL as it would be without the wrapper: the control."""
    plain = model.clone()
    plain.remove_wrappers_with_key(CALCULATE, "parallel_dit_concurrent_conds")
    return plain


def sampled(model, prompts, latent, **settings) -> torch.Tensor:
    return ksampler(model, prompts, latent, steps=STEPS, **settings)


def counted(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """What the run gives; the micro-steps of each rank; which share of the last rank's work the first one worked too."""
    result = run()
    spans = [to_spans(line, 0.0) for line in registry().present().timeline(lambda: None)]
    work = [own[own["kind"] == WORK] for own in spans]
    first, last = work[0], work[-1]
    shared = sum(max(0.0, min(a["stop"], b["stop"]) - max(a["start"], b["start"])) for a in first for b in last)
    worked = float((last["stop"] - last["start"]).sum())
    return result, {"micro-steps": [len(own) for own in work], "shared": shared / worked if worked else 0.0}


def compare(make: Callable, model, prompts, latent) -> tuple[torch.Tensor, dict]:
    """Side by side and one by one."""
    apart, sequential = counted(lambda: make(one_by_one(model), prompts, latent))
    found, counts = counted(lambda: make(model, prompts, latent))
    return found, counts | {"one by one": sequential, "same": difference(found, apart)}


def main(results: Results) -> None:
    positive, negative = prompts_of(NAME)
    prompts, latent, file = (positive, shortened(negative, 6)), latent_of(NAME), f"{NAME}.safetensors"

    def beside_native(make: Callable) -> dict:
        expected = make(native_model(file), prompts, latent)
        found, counts = compare(make, parallel(file, pipe=1, batch=2), prompts, latent)
        return counts | {"native": difference(found, expected), "largest": float(expected.abs().max())}

    with small(NAME):
        results.case("KSampler, 2", lambda: beside_native(sampled))
    on_the_bundled_model(results)


def on_the_bundled_model(results: Results) -> None:
    """What may stand in the way."""
    told, model = Told(), parallel(BUNDLED, pipe=1, batch=2)
    positive, negative = (node("QuickstartPrompt", text) for text in ("3 1 4 1", ""))
    empty = torch.zeros(1, 16, 16, 16)
    unequal = [positive, shortened(negative, 3)]

    def case(name: str, prompts, make: Callable = sampled, with_model=model, latent=empty, more=dict) -> None:
        def measure() -> dict:
            told.texts.clear()
            found = compare(make, with_model, prompts, latent)[1]
            return found | {"told": list(told.texts)} | more()

        results.case(name, measure)

    case("unequal", unequal)
    case("cfg 1", unequal, partial(sampled, cfg=1.0))

    seen: list[list[bool]] = []

    def notes(executor, model, conds, *arguments):
        seen.append([cond is not None for cond in conds])
        return executor(model, conds, *arguments)

    wrapped = model.clone()
    wrapped.add_wrapper_with_key(CALCULATE, "another pack", notes)
    case("another pack's wrapper", unequal, with_model=wrapped, more=lambda: {"seen": seen})

    stateful = model.clone()
    stateful.set_model_unet_function_wrapper(lambda apply, given: apply(given["input"], given["timestep"], **given["c"]))
    case("another pack's model function", unequal, with_model=stateful)

    narrow = [positive, [[unequal[1][0][0][..., :5], unequal[1][0][1]]]]
    results.case("error in the second call", partial(sampled, model, narrow, empty))
    results.case("cancelled", partial(_cancelled, model, unequal, empty))


def _cancelled(model, prompts, latent) -> dict:
    """Cancel is pressed while both calls of the third step are under way; what they would give never comes."""
    remote = registry().present()
    post, posted = remote.post, []

    def post_two_steps(call):
        posted.append(call)
        if len(posted) <= 4:
            post(call)
        elif len(posted) == 6:
            comfy.model_management.interrupt_current_processing(True)

    remote.post = post_two_steps
    try:
        sampled(model, prompts, latent)
        return {"raised": None}
    except comfy.model_management.InterruptProcessingException as cancelled:
        return {"raised": type(cancelled).__name__, "posted": len(posted)}
    finally:
        remote.post = post
