"""Every node of the pack called with what its inputs do not allow, and with what they allow and nobody gives. Run by
ComfyUI's Python, see boot.py.

Property: a ValueError that begins with an input's name, or a right result, and the ranks live on either way.
"""

import copy
import math
import random
from typing import Any

from boot import BASE, Results, comfy, difference, ksampler, node, nodes, parallel, torch

FILE = "tiny.safetensors"
SEED = 5
ROUNDS = 24
"""Random calls of each node."""
STEPS = 3
PACK = "Parallel DiT"

NUMBERS = (0, 1, -1, 2, 3, 65, 2**31, 2**63, 2**64, 10**30, 1.0, 2.0, 0.5, math.nan, math.inf, -math.inf, 1e300, True)
OTHERS = (None, "", "1", "2.5", "nan", "x", "\0", "ü", [], [1], {}, {"samples": None}, object(), torch.zeros(1), (1, 2))
NAMES = (
    *("../../etc/passwd", "/etc/passwd", "..", "", "a\0b", "C:\\x", "\\\\host\\share", "x" * 5000, "%00"),
    *("../models/diffusion_models/tiny.safetensors", "tiny.safetensors/", FILE),
)
DEVICES = ("auto", "cuda:99", "cpu,,cpu", "cpu, cpu ", "CPU", "çpu", "cpu\0", "," * 1000, "meta", "cuda:-1", "ray:cpu,cpu:x")


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
    mappings = {name: kind for name, kind in nodes.NODE_CLASS_MAPPINGS.items() if getattr(kind, "CATEGORY", "") == PACK}
    inputs = {name: inputs_of(kind) for name, kind in mappings.items()}
    names = ("positive, negative", "control_net", *{name for given in inputs.values() for name in given})
    rng = random.Random(SEED)
    model = parallel(FILE, stage_split="even")
    native = node("UNETLoader", FILE, "default")
    prompts = [conditionings(g)[0] for _ in range(2)]
    sound = {"samples": torch.zeros(1, 16, 4, 4)}
    config = node("UlyssesConfig", 1, 1, "none", 1, "auto", True)
    values = {
        "MODEL": (model, native, comfy, *OTHERS),
        "LATENT": (*latents(), *OTHERS),
        "CONDITIONING": (*conditionings(g), *OTHERS),
        "PARALLEL_CONFIG": (config, *OTHERS),
        "VAE": (model, *OTHERS),
        "IMAGE": (torch.zeros(1, 16, 16, 3), torch.zeros(16, 16, 3), torch.zeros(0, 8, 8, 3), *OTHERS),
        "INT": (*NUMBERS, *OTHERS),
        "FLOAT": (*NUMBERS, *OTHERS),
        "BOOLEAN": (True, False, *NUMBERS, *OTHERS),
        "STRING": (*NAMES, *DEVICES, *NUMBERS, *OTHERS),
    }
    first = {  # what each node is called with where nothing is odd
        "ParallelDiTLoader": dict(model_name=FILE, weight_dtype="fp32", pipefusion_degree=2, tensor_parallel_degree=1)
        | dict(split_batch_degree=1, devices="cpu,cpu", parallel_config=None, stage_split="even", degrees="as set")
        | dict(compile=False),
        "UlyssesConfig": dict(ulysses_degree=1, ring_degree=1, patch_mode="none", patch_degree=1, attention="auto")
        | dict(comm_overlap=True, patch_warmup_steps=1, transfer_dtype="full", keep_run=True),
        "PipeFusionSampler": dict(model=model, seed=42, steps=STEPS, cfg=3.0, sampler_name="euler", scheduler="simple")
        | dict(positive=prompts[0], negative=prompts[1], latent_image=sound, denoise=1.0, num_pipeline_patch=0)
        | dict(warmup_steps=STEPS, overlap=True, extrapolate=True, step_cache=0.0),
        "ApplyPipeFusion": dict(model=model, num_pipeline_patch=2, warmup_steps=1, overlap=True, extrapolate=True),
        "QuickstartPrompt": dict(text="3 1 4 1"),
        "QuickstartDecode": dict(samples=sound),
        "UnloadParallelDiT": dict(anything=None),
        "ParallelVAEDecode": dict(samples=sound, vae=None, devices="cpu,cpu"),
        "ParallelVAEEncode": dict(pixels=torch.zeros(1, 16, 16, 3), vae=None, devices="cpu,cpu"),
        "ParallelTrace": dict(filename_prefix="trace", after=None),
        "ParallelStepCache": dict(model=model, threshold=0.04, start_percent=0.0, end_percent=1.0),
    }

    def pids() -> tuple[int, ...]:
        return registry().pool.pids

    def called(name: str, arguments: dict[str, Any]) -> tuple[str, Any]:
        """What came of it, in words, and the first output."""
        try:
            kind = mappings[name]
            output = getattr(kind(), kind.FUNCTION)(**arguments)
            return "done", (output["result"] if isinstance(output, dict) else output)[0]
        except ValueError as error:
            if str(error).startswith(names):
                return "refused", None
            raise

    def odd_inputs(name: str) -> dict[str, int]:
        """Random calls with one or two odd inputs; how many came to what."""
        outcomes: dict[str, int] = {}
        alive = pids()
        for index in range(ROUNDS):
            arguments = dict(first[name])
            changed = rng.sample(list(arguments), min(len(arguments), rng.choice((1, 1, 2))))
            for each in changed:
                kind = inputs[name][each]
                choices = (*kind, *OTHERS) if isinstance(kind, (list, tuple)) else values.get(kind, OTHERS)
                choices = (*NAMES, *OTHERS) if each == "model_name" else choices
                value = rng.choice(choices)
                if each == "steps" and isinstance(value, int) and value > 10:
                    value = 10
                arguments[each] = value
            try:
                came, output = called(name, arguments)
                if came == "done":
                    check(name, arguments, output)
            except Exception as error:
                text = {each: repr(arguments[each])[:200] for each in changed}
                raise AssertionError(f"call {index} of {name} with {text}") from error
            outcomes[came] = outcomes.get(came, 0) + 1
            if name == "ParallelDiTLoader":
                continue
            assert pids() == alive, f"call {index} of {name} ended the ranks: {changed}"
        return outcomes

    def check(name: str, arguments: dict[str, Any], output: Any) -> None:
        """That what came out is right, as far as the node can be held to another."""
        if name == "PipeFusionSampler":
            samples = output["samples"]
            exact = arguments["warmup_steps"] >= arguments["steps"] and not arguments["step_cache"]
            if exact and samples.isfinite().all():
                plain = dict(steps=int(arguments["steps"]), cfg=float(arguments["cfg"]), seed=int(arguments["seed"]))
                plain |= dict(denoise=float(arguments["denoise"]), sampler=arguments["sampler_name"])
                pair = (arguments["positive"], arguments["negative"])
                latent = copy.copy(arguments["latent_image"])
                same = ksampler(native, pair, latent, scheduler=arguments["scheduler"], **plain)
                assert samples.shape == same.shape, (samples.shape, same.shape)
                far = difference(samples, same) / max(1.0, float(same.abs().max()))
                assert far <= 1e-3, f"{far} from one process"
        elif name == "ParallelTrace":
            assert all(path.is_relative_to(BASE / "output") for path in (BASE / "output").rglob("*.json"))
        elif name == "QuickstartPrompt":
            assert output[0][0].shape == (1, 4, 32)
        elif name == "ParallelDiTLoader":
            key = output.model.diffusion_model.setup
            assert key.path.is_file() or key.path.is_dir()
            folder = BASE / "models" / "diffusion_models"
            assert key.path.is_relative_to(folder) or key.path.name == "quickstart-digits.safetensors", key.path

    with torch.inference_mode():
        expected = ksampler(model, prompts, sound, steps=STEPS)
        results.case("the native model's", lambda: difference(expected, ksampler(native, prompts, sound, steps=STEPS)))

    def after() -> float:
        """The next prompt's difference from the first."""
        return difference(expected, ksampler(model, prompts, sound, steps=STEPS))

    for name in (*first,):
        results.case(name, lambda name=name: odd_inputs(name))
        results.case(f"after {name}", after)

    def under_ksampler(latent: Any, pair: Any) -> str:
        """Latents and prompts reach our MODEL unchecked: the native model's result, or no result of either."""
        try:
            theirs = ksampler(native, pair, copy.copy(latent), steps=STEPS)
        except Exception:
            theirs = None
        try:
            ours = ksampler(model, pair, copy.copy(latent), steps=STEPS)
        except ValueError as error:
            if str(error).startswith(names):
                return "refused"
            assert theirs is None, f"{latent} {error}"
            return "refused by ComfyUI"
        except Exception as error:
            assert theirs is None and "rank" not in str(error), error
            return "refused by ComfyUI"
        if theirs is not None and theirs.isfinite().all():
            assert difference(ours, theirs) <= 1e-3 * max(1.0, float(theirs.abs().max()))
        return "done"

    def native_sampler() -> dict[str, int]:
        alive = pids()
        given = [*((latent, prompts) for latent in latents()), *((sound, (each, prompts[1])) for each in conditionings(g))]
        outcomes = [under_ksampler(latent, pair) for latent, pair in given]
        assert pids() == alive
        return {outcome: outcomes.count(outcome) for outcome in ("done", "refused", "refused by ComfyUI")}

    results.case("KSampler", native_sampler)
    results.case("after KSampler", after)

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

    results.case("strengths", strengths)
    results.case("after strengths", after)
    results.case("outside", lambda: sorted(str(path) for path in BASE.parent.iterdir()))


def inputs_of(kind: type) -> dict[str, Any]:
    groups = kind.INPUT_TYPES()
    return {name: spec[0] for group in ("required", "optional") for name, spec in groups.get(group, {}).items()}
