"""Prompts that ComfyUI cannot join to one model call, with one and two replicas. Run by serve.py.

The test process has put families' files and conditioning where families.py looks for them.
"""

import logging
from collections.abc import Callable
from functools import partial

from boot import BASE, BUNDLED, Results, comfy, difference, ksampler, node, parallel, torch
from families import detecting, read

STEPS = 3
CALCULATE = comfy.patcher_extension.WrappersMP.CALC_COND_BATCH


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Parallel DiT"):
            self.texts.append(record.getMessage())


def shortened(prompt: list, tokens: int) -> list:
    """The prompt with its first `tokens` tokens only."""
    (text, extras), *others = prompt
    return [[text[:, :tokens], extras], *others]


def one_by_one(model):
    """The same MODEL as it would be without the wrapper: the control."""
    plain = model.clone()
    plain.remove_wrappers_with_key(CALCULATE, "parallel_dit_concurrent_conds")
    return plain


def custom(model, prompts, latent, guider: str) -> torch.Tensor:
    """SamplerCustomAdvanced, by what its nodes call."""
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    if guider == "DualCFGGuider":
        chosen = Guider_DualCFG(model)
        chosen.set_conds(*prompts, shortened(prompts[0], 3))
        chosen.set_cfg(2.0, 1.5)
    else:
        chosen = comfy.samplers.CFGGuider(model)
        chosen.set_conds(*prompts)
        chosen.set_cfg(3.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(42))
    return chosen.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, seed=42)


RUNS: dict[str, Callable] = {
    "KSampler": lambda model, prompts, latent: ksampler(model, prompts, latent, steps=STEPS),
    "CFGGuider": partial(custom, guider="CFGGuider"),
    "DualCFGGuider": partial(custom, guider="DualCFGGuider"),
}


def pipefusion(model, prompts, latent, warm_up: int) -> torch.Tensor:
    return ksampler(node("ApplyPipeFusion", model, 2, warm_up, True), prompts, latent, steps=STEPS)


BANDS: dict[str, Callable] = {
    "PipeFusion": partial(pipefusion, warm_up=1),
    "PipeFusion, all steps warm-up": partial(pipefusion, warm_up=1000),
}


def counted(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """What the run gives; the micro-steps of each rank; which share of the last rank's work the first one worked too."""
    from parallel_backend.client.registry import registry
    from parallel_backend.client.reports.trace import to_spans
    from parallel_backend.wire.timeline_kinds import WORK

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


class Families:
    """The families' own runs, in ComfyUI's own model and then on ranks."""

    def __init__(self):
        self.native: dict[tuple[str, str], torch.Tensor] = {}
        self.staged: dict[tuple[str, str], torch.Tensor] = {}

    @staticmethod
    def given(name: str):
        positive, negative, latent, settings = read(name)
        return (positive, shortened(negative, 6)), latent, detecting(settings["detected"])

    def natively(self, name: str) -> dict:
        prompts, latent, detection = self.given(name)
        path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
        with detection:
            model = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
        for run, make in RUNS.items():
            self.native[name, run] = make(model, prompts, latent)
        self.native[name, "PipeFusion, all steps warm-up"] = self.native[name, "KSampler"]
        return {"finite": all(bool(found.isfinite().all()) for found in self.native.values())}

    def on_ranks(self, name: str, run: str, make: Callable, degrees: dict) -> dict:
        prompts, latent, detection = self.given(name)
        with detection:
            model = parallel(f"{name}.safetensors", stage_split="even", **degrees)
        found, counts = compare(make, model, prompts, latent)
        if degrees.get("batch", 1) == 1:
            self.staged[name, run] = found
        elif (name, run) in self.staged:
            counts["one replica"] = difference(found, self.staged[name, run])
        if (name, run) in self.native:
            native = self.native[name, run]
            counts |= {"native": difference(found, native), "largest": float(native.abs().max())}
        return counts


def main(results: Results, names: list[str]) -> None:
    families = Families()
    for name in names:
        results.case(f"{name}, native", partial(families.natively, name))
    # The outer loops: other numbers of ranks start other processes.
    for degrees, runs in (
        ({"pipe": 1, "batch": 2}, RUNS),
        ({"pipe": 2}, BANDS),
        ({"pipe": 2, "batch": 2, "devices": "cpu,cpu,cpu,cpu"}, BANDS),
    ):
        for name in names:
            for run, make in runs.items():
                replicas = degrees.get("batch", 1)
                results.case(f"{name}, {run}, {replicas}", partial(families.on_ranks, name, run, make, degrees))
    on_the_bundled_model(results)


class Adds(comfy.controlnet.ControlBase):
    """A ControlNet of one tensor, made of what it is called with."""

    def __init__(self, hidden: int):
        super().__init__()
        self.direction = torch.randn(hidden, generator=torch.Generator().manual_seed(3))

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        tokens = x_noisy.shape[-2] * x_noisy.shape[-1] // 4
        seen = x_noisy.flatten(1).std(1).view(-1, 1, 1) * cond["c_crossattn"].mean()
        return {"output": [(seen * self.direction).expand(-1, tokens, -1)]}


def on_the_bundled_model(results: Results) -> None:
    """What may stand in the way."""
    logging.getLogger().addHandler(told := Warnings())
    model = parallel(BUNDLED, pipe=1, batch=2)
    positive, negative = (node("QuickstartPrompt", text) for text in ("3 1 4 1", ""))
    empty = torch.zeros(1, 16, 16, 16)
    unequal = [positive, shortened(negative, 3)]
    run = RUNS["KSampler"]

    def case(name: str, prompts, make: Callable = run, with_model=model, latent=empty, more=dict) -> None:
        def measure() -> dict:
            told.texts.clear()
            found = compare(make, with_model, prompts, latent)[1]
            return found | {"told": list(told.texts)} | more()

        results.case(name, measure)

    case("unequal", unequal)
    case("equal", [positive, negative])
    case("two pictures", unequal, latent=torch.zeros(2, 16, 16, 16))
    case("three pictures", unequal, latent=torch.zeros(3, 16, 16, 16))
    area = node("ConditioningSetArea", positive, 64, 128, 0, 0, 1.0)
    case("area", [area, negative])
    other = node("ConditioningSetArea", negative, 96, 128, 32, 0, 0.7)
    case("two areas", [[*area, *other], negative])
    case("cfg 1", unequal, partial(_cfg_1))

    control = Adds(model.model.diffusion_model.checkpoint.family.sizes.hidden(model.model.diffusion_model.checkpoint.config))
    controlled = [[[text, {**extras, "control": control}] for text, extras in prompt] for prompt in unequal]
    case("control", controlled, more=lambda: {"far": _far(run, model, controlled, unequal, empty)})

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
    results.case("error in the second call", partial(run, model, narrow, empty))
    case("after the error", unequal)
    results.case("cancelled", partial(_cancelled, run, model, unequal, empty))
    case("after the cancellation", unequal)


def _cfg_1(model, prompts, latent) -> torch.Tensor:
    return ksampler(model, prompts, latent, steps=STEPS, cfg=1.0)


def _far(run, model, prompts, others, latent) -> float:
    return difference(run(model, prompts, latent), run(model, others, latent))


def _cancelled(run, model, prompts, latent) -> dict:
    """Cancel is pressed while both calls of the third step are under way; what they would give never comes."""
    from parallel_backend.client.registry import registry

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
        run(model, prompts, latent)
        return {"raised": None}
    except comfy.model_management.InterruptProcessingException as cancelled:
        return {"raised": type(cancelled).__name__, "posted": len(posted)}
    finally:
        remote.post = post
