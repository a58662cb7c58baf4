"""LoRAs in conditionings (hooks), scheduled ones, and LoRAs in bypass mode: Parallel DiT Loader's MODEL against ComfyUI's
own. Run by serve.py.
"""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

from boot import BASE, Results, comfy, difference, ksampler, node, nodes, parallel, torch
from lora import FILES, RANK, Maker

from parallel_backend.client.lora import Deltas
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.loading import Weigh

WIDTH = {"Flux": 256, "SD3": 192}


def main(results: Results) -> None:
    from comfy_extras import nodes_hooks, nodes_lora_debug  # once ComfyUI is up

    for module in (nodes_hooks, nodes_lora_debug):
        nodes.NODE_CLASS_MAPPINGS.update(module.NODE_CLASS_MAPPINGS)
    for family in FILES:
        compare_family(family, results)


def hook(file: str, strength: float = 1.0, before=None):
    return node("CreateHookLoraModelOnly", file, strength, before)


def scheduled(hooks, *strengths: float):
    """The hooks, at each of these strengths for an equal part of the steps."""
    frames = None
    for index, strength in enumerate(strengths):
        frames = node("CreateHookKeyframe", strength, index / len(strengths), frames)
    return node("SetHookKeyframes", hooks, frames)


def with_hooks(text: list, hooks, mask: torch.Tensor | None = None) -> list:
    return node("ConditioningSetProperties", text, 1.0, "default", mask, hooks)


def bypassed(model, file: str, strength: float = 0.8):
    return node("LoraLoaderBypassModelOnly", model, file, strength)


def compare_family(family: str, results: Results) -> None:
    path = BASE / "models" / "diffusion_models" / FILES[family]
    native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
    ours = parallel(FILES[family], stage_split="even")
    make, g = Maker(family, native), torch.Generator().manual_seed(0)
    prompts = [[[torch.randn(1, 9, 64, generator=g), {"pooled_output": torch.randn(1, 32, generator=g)}]] for _ in range(2)]
    positive, negative = prompts
    first, second, whole = make.whole("original"), make.whole("original", " 2"), make.differences()
    partly = make.partly()

    def sample(model, texts=prompts) -> torch.Tensor:
        return ksampler(model, texts, torch.zeros(1, 16, 12, 16))

    plain, before = sample(native), sample(ours)

    def case(
        name: str,
        texts: Callable[[], list] = lambda: prompts,
        change: Callable = lambda model: model,
        more: Callable = lambda model: model,
    ) -> None:
        """Texts are made anew for each: hooks keep where they are in their schedule."""

        def compare() -> dict[str, float]:
            expected, found = sample(change(native), texts()), sample(change(more(ours)), texts())
            return {"difference": difference(expected, found), "moved": difference(expected, plain)}

        results.case(f"{family}, {name}", compare)

    def a_hook_for_each() -> list:
        return [with_hooks(positive, hook(first)), with_hooks(negative, hook(second, 0.7))]

    def for_both(hooks) -> list:
        return [with_hooks(text, hooks) for text in prompts]

    def over_a_region() -> list:
        """The left half of the picture, and a prompt without it for all of the rest."""
        left = torch.zeros(1, 12, 16)
        left[..., :8] = 1.0
        return [node("ConditioningSetDefaultCombine", with_hooks(positive, hook(first), left), negative), negative]

    def as_lora() -> list:
        """What another model differs by."""
        g = torch.Generator().manual_seed(7)
        others = {
            key: value + 0.1 * torch.randn(value.shape, generator=g) / value.shape[-1] ** 0.5
            for key, value in native.model.state_dict().items()
            if key.startswith("diffusion_model.") and value.ndim
        }
        return [with_hooks(positive, comfy.hooks.create_hook_model_as_lora(others, None, 0.7, 0.0)), negative]

    case("hook of one prompt", lambda: [with_hooks(positive, hook(first)), negative])
    case("a hook for each", a_hook_for_each)
    case("two hooks together", lambda: for_both(hook(second, -0.3, hook(first, 0.6))))
    case("keyframes", lambda: for_both(scheduled(hook(first), 0.0, 1.0, 0.25, 1.0)))
    case("keyframes of whole differences", lambda: [with_hooks(positive, scheduled(hook(whole), 1.0, 0.5)), negative])
    case("hook with a layer of another size", lambda: [with_hooks(positive, hook(partly)), negative])
    case("hook of a region", over_a_region)
    case("hook of a model", as_lora)
    with_lora = partial(node, "LoraLoaderModelOnly", lora_name=whole, strength_model=0.5)
    case("hooks beside a LoRA", a_hook_for_each, with_lora)
    case("hooks beside a LoRA in bypass mode", a_hook_for_each, partial(bypassed, file=second))
    case("hooks under PipeFusion", a_hook_for_each, more=lambda model: node("ApplyPipeFusion", model, 4, 1, True))

    def sent() -> dict[str, int]:
        """How often factors are sent, and strengths, in a run and in the same run again."""
        texts, kinds, send, replace = a_hook_for_each(), [], Pool.send, Deltas.replace

        def spy(pool: Pool, rank: int, message, *rest) -> None:
            kinds.append(type(message))
            send(pool, rank, message, *rest)

        def spy_replace(deltas: Deltas, *arguments) -> None:
            kinds.append(Deltas)
            replace(deltas, *arguments)

        with patch.object(Pool, "send", spy), patch.object(Deltas, "replace", spy_replace):
            sample(ours, texts)
            once = kinds.count(Deltas)
            sample(ours, texts)
        return {"once": once, "twice": kinds.count(Deltas), "weighed": kinds.count(Weigh)}

    results.case(f"{family}, sent", sent)
    results.case(f"{family}, hooks gone", lambda: difference(before, sample(ours)))

    width = WIDTH[family]
    factors = {"lora_B.weight": make.random(width, RANK), "lora_A.weight": 0.1 * make.random(RANK, width)}
    dora = make.one("DoRA in bypass", factors | {"dora_scale": make.random(width, 1)})
    files = {
        "LoRA": first,
        "differences": whole,
        "LoHa": make.matrices("LoHa", make.loha),
        "LoKr": make.matrices("LoKr", make.lokr),
        "DoRA": dora,
    }
    for kind, file in files.items():
        case(f"bypass of {kind}", change=partial(bypassed, file=file))
    case("bypass beside a LoRA", change=lambda model: with_lora(bypassed(model, first)))
    case("bypass once more", change=lambda model: bypassed(bypassed(model, first), second, 0.5))

    def taken_away() -> float:
        """A MODEL that has another LoRA left."""
        expected = sample(with_lora(ours))
        model = bypassed(with_lora(ours), first)
        sample(model)
        for key in list(model.injections):
            model.remove_injections(key)
        return difference(expected, sample(model))

    if family == "Flux":
        results.case("Flux, bypass gone", taken_away)
    if family == "SD3":
        case("bypass of a convolution", change=partial(bypassed, file=make.locon()))
    narrow = {"lora_B.weight": factors["lora_B.weight"], "lora_A.weight": make.random(RANK, width // 2)}
    larger = narrow | {"lora_A.weight": make.random(RANK, 2 * width), "reshape_weight": torch.tensor([width, 2 * width])}
    narrow, larger = make.one("of another size", narrow), make.one("enlarging a layer", larger)
    results.case(f"{family}, refusal of another size", lambda: bypassed(ours, narrow))
    results.case(f"{family}, refusal of enlarging in bypass mode", lambda: bypassed(ours, larger))
    results.case(f"{family}, refusal of enlarging in a hook", lambda: sample(ours, for_both(hook(larger))))
    oft = make.one("OFT in bypass", {"oft_blocks": torch.ones(8, width // 8, width // 8)})
    results.case(f"{family}, refusal of OFT", lambda: bypassed(ours, oft))
    results.case(f"{family}, refusal of DoRA in a hook", lambda: sample(ours, for_both(hook(dora))))
