"""LoRAs, merges and saved files of Parallel DiT Loader's MODEL against those of ComfyUI's own. Run by serve.py.

The LoRA files are made from ComfyUI's own table of names, so that they have every name that it knows.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import comfy
import torch
from boot import BASE, MODELS, Results, Told, difference, ksampler, native_model, node, nodes, parallel, random_prompts
from safetensors.torch import load_file, save_file

FLUX, SD3 = "tiny.safetensors", "tiny-sd3.safetensors"
FORMATS = {"kohya": "lora_unet_", "original": "diffusion_model."}
RANK, WIDTH = 4, 256
SQUARE = torch.Size((WIDTH, WIDTH))
LAYER = "double_blocks.0.img_attn.proj"
WIDE, NARROW = torch.ones(WIDTH, RANK), torch.ones(RANK, 128)
LEFT_OUT = {  # for a weight of [256, 256]: a kind -> what ComfyUI leaves out, and only logs
    "LoRA": {"lora_B.weight": WIDE, "lora_A.weight": NARROW},
    "LoHa": {f"hada_w{each}_{side}": size for each in (1, 2) for side, size in (("a", WIDE), ("b", NARROW))},
    "OFT": {"oft_blocks": torch.ones(8, 30, 30)},
    "difference": {"diff": torch.ones(WIDTH, 128)},
}
FAILING = {  # what ComfyUI itself cannot compute with
    "factors of a LoKr": {"lokr_w1_a": torch.ones(4, 8), "lokr_w1_b": torch.ones(2, 4), "lokr_w2": torch.ones(64, 64)},
    "making smaller": {
        "lora_B.weight": WIDE,
        "lora_A.weight": torch.ones(RANK, WIDTH),
        "reshape_weight": torch.tensor([WIDTH, 128]),
    },
    "enlarging": {
        "lora_B.weight": WIDE,
        "lora_A.weight": torch.ones(RANK, 2 * WIDTH),
        "reshape_weight": torch.tensor([WIDTH, 2 * WIDTH]),
    },
}


class Maker:
    """Writes LoRA files for a native MODEL into ComfyUI's folder."""

    def __init__(self, model):
        self.names = comfy.lora.model_lora_keys_unet(model.model, {})
        # Not SD3's table of positions, a buffer: ComfyUI keeps a patch for it, but patches parameters only.
        self.shapes = {key: value.shape for key, value in model.model.named_parameters()}
        self.generator = torch.Generator().manual_seed(3)

    def targets(self, form: str, keep: Callable[[torch.Size], bool] = lambda shape: len(shape) >= 2):
        """(LoRA's name for it, shape) of each weight, or part of one, that files of this format name; each once."""
        found = {}
        for name, target in self.names.items():
            if name.startswith(FORMATS[form]):
                key, offset = (target, None) if isinstance(target, str) else (*target, None)[:2]
                shape = list(self.shapes[key]) if key in self.shapes else [0]
                if offset is not None:
                    shape[offset[0]] = offset[2]
                if shape[0] and keep(torch.Size(shape)):
                    found.setdefault((key, offset), (name, torch.Size(shape)))
        return list(found.values())

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def low_rank(self, name: str, shape: torch.Size, form: str) -> dict[str, torch.Tensor]:
        """About a third as strong as the weight itself: stronger ones blow the picture up, and its rounding."""
        columns = shape[1:].numel()
        up, down = self.random(shape[0], RANK), self.random(RANK, columns) * 0.2 / (columns * RANK) ** 0.5
        if len(shape) > 2:
            up, down = up.view(*up.shape, *(1 for _ in shape[2:])), down.view(RANK, *shape[1:])
        if form == "kohya":
            return {f"{name}.lora_up.weight": up * 4, f"{name}.lora_down.weight": down, f"{name}.alpha": torch.tensor(1.0)}
        return {f"{name}.lora_B.weight": up, f"{name}.lora_A.weight": down}

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> str:
        file = f"{name}.safetensors"
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, BASE / "models" / "loras" / file)
        return file

    def whole(self, form: str, copy: str = "") -> str:
        """A file with a LoRA for everything."""
        tensors = {}
        for name, shape in self.targets(form):
            tensors |= self.low_rank(name, shape, form)
        return self.save(form + copy, tensors)

    def differences(self) -> str:
        """Differences of weights, norms and biases, in full."""
        tensors = {}
        for name, shape in self.targets("original", lambda shape: True):
            if name.endswith(".bias"):
                continue
            tensors[f"{name}.diff"] = 0.1 * self.random(*shape) / shape[1:].numel() ** 0.5
            if (bias := self.shapes.get(f"{name}.bias")) is not None:
                tensors[f"{name}.diff_b"] = 0.1 * self.random(*bias)
        return self.save("differences", tensors)

    def lokr(self) -> str:
        """A LoKr for every second matrix."""
        tensors = {}
        for name, shape in self.targets("original", lambda shape: len(shape) == 2)[::2]:
            rows, columns = shape[0] // 4, shape[1] // 4
            tensors |= {
                f"{name}.lokr_w1": self.random(4, 4),
                f"{name}.lokr_w2_a": self.random(rows, RANK),
                f"{name}.lokr_w2_b": 0.3 / (shape[1] * RANK) ** 0.5 * self.random(RANK, columns),
                f"{name}.alpha": torch.tensor(3.0),
            }
        return self.save("LoKr", tensors)

    def locon(self) -> str:
        """For SD3's convolution, with a third factor."""
        width, channels, *side = self.shapes["diffusion_model.x_embedder.proj.weight"]
        up, mid, down = self.random(width, RANK, 1, 1), self.random(RANK, RANK, *side), self.random(RANK, channels, 1, 1)
        factors = {"up": 0.1 * up, "mid": 0.1 * mid, "down": down}
        return self.save("LoCon", {f"lora_unet_x_embedder_proj.lora_{key}.weight": value for key, value in factors.items()})

    def one(self, kind: str, tensors: dict[str, torch.Tensor]) -> str:
        """A file of some kind for one layer of the Flux."""
        return self.save(kind, {f"diffusion_model.{LAYER}.{key}": value for key, value in tensors.items()})

    def control(self) -> str:
        """As Black Forest Labs' LoRAs for depth and canny: for everything, with a first layer for twice the channels."""
        tensors = {}
        for name, shape in self.targets("original"):
            layer = name.removeprefix(FORMATS["original"])
            if layer == "img_in":
                shape = torch.Size((shape[0], 2 * shape[1]))
            for key, value in self.low_rank(name, shape, "original").items():
                tensors[f"{layer}.{key.removeprefix(name)[1:]}"] = value
            if (bias := self.shapes.get(f"{name}.bias")) is not None:
                tensors[f"{layer}.lora_B.bias"] = 0.1 * self.random(*bias)
        for key, shape in self.shapes.items():
            if "_norm." in key:
                layer = key.removeprefix("diffusion_model.").rpartition(".")[0]
                tensors[f"{layer}.scale"] = 1 + 0.1 * self.random(*shape)
        return self.save("control", tensors)


def with_lora(model, file: str, strength: float = 1.0):
    return node("LoraLoaderModelOnly", model, file, strength)


def bypassed(model, file: str, strength: float = 0.8):
    return node("LoraLoaderBypassModelOnly", model, file, strength)


def hook(file: str, strength: float = 1.0):
    return node("CreateHookLoraModelOnly", file, strength, None)


def scheduled(hooks, *strengths: float):
    """The hooks, at each of these strengths for an equal part of the steps."""
    frames = None
    for index, strength in enumerate(strengths):
        frames = node("CreateHookKeyframe", strength, index / len(strengths), frames)
    return node("SetHookKeyframes", hooks, frames)


def with_hooks(text: list, hooks, mask: torch.Tensor | None = None) -> list:
    return node("ConditioningSetProperties", text, 1.0, "default", mask, hooks)


def merge(one, other, ratio: float = 0.3):
    return node("ModelMergeSimple", one, other, ratio)


class Comparison:
    """The MODELs of a file, ComfyUI's own and ours."""

    def __init__(self, results: Results, file: str):
        self.results, self.native, self.ours = results, native_model(file), parallel(file, stage_split="even")
        self.make, self.prompts = Maker(self.native), random_prompts(9, 9)
        with torch.inference_mode():
            self.plain = self.sample(self.ours)

    def sample(self, model, texts: list | None = None, steps: int = 3) -> torch.Tensor:
        return ksampler(model, texts or self.prompts, torch.zeros(1, 16, 12, 16), steps=steps)

    def compare(
        self,
        change: Callable = lambda model: model,
        ours: Callable = lambda model: model,
        texts: Callable[[], list] = list,
    ) -> dict[str, float]:
        """`change`: of both MODELs. `ours`: of ours before that. Texts are made anew for each: hooks keep where they are in
        their schedule."""
        expected, found = self.sample(change(self.native), texts()), self.sample(change(ours(self.ours)), texts())
        return {"difference": difference(expected, found), "moved": difference(expected, self.plain)}

    def case(self, name: str, change: Callable = lambda model: model, **more: Callable) -> None:
        self.results.case(name, partial(self.compare, change, **more))

    def removed(self, name: str) -> None:
        self.results.case(name, lambda: {"difference": difference(self.plain, self.sample(self.ours))})

    def names(self, kind: str) -> None:
        both = (self.native.model, self.ours.model)
        shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in both]
        self.results.case(f"{kind}, names and shapes", lambda: {"same": shapes[0] == shapes[1], "count": len(shapes[0])})
        names = [comfy.lora.model_lora_keys_unet(model, {}) for model in both]
        self.results.case(f"{kind}, LoRA names", lambda: {"same": names[0] == names[1], "count": len(names[0])})


def over_tensor(_model):
    return parallel(FLUX, pipe=1, tensor=2)


def main(results: Results) -> None:
    from comfy_extras import nodes_hooks, nodes_lora_debug, nodes_model_merging  # once ComfyUI is up

    for module in (nodes_hooks, nodes_lora_debug, nodes_model_merging):
        nodes.NODE_CLASS_MAPPINGS.update(module.NODE_CLASS_MAPPINGS)
    flux = Comparison(results, FLUX)
    flux.names("Flux")
    loras = {form: flux.make.whole(form) for form in FORMATS}
    files(flux, loras)
    of_another_size(flux)
    enlarging(flux)
    hooks(flux, loras["original"])
    bypass(flux, loras["original"])
    merges(flux, loras["original"])
    flux.removed("after all")
    sd3 = Comparison(results, SD3)
    sd3.names("SD3")
    sd3.case("SD3, kohya", partial(with_lora, file=sd3.make.whole("kohya", " SD3")))
    sd3.case("SD3, LoCon with a third factor", partial(with_lora, file=sd3.make.locon()))


def files(flux: Comparison, loras: dict[str, str]) -> None:
    make, results, ours = flux.make, flux.results, flux.ours
    for form, file in loras.items():
        flux.case(form, partial(with_lora, file=file))
    original = partial(with_lora, file=loras["original"])
    other = make.whole("original", " too")
    results.case("tensor_parallel_degree 2", lambda: flux.compare(original, over_tensor))
    flux.case("two on one another", lambda model: with_lora(original(model), other, 0.5))
    flux.case("differences", partial(with_lora, file=make.differences()))
    flux.case("LoKr", partial(with_lora, file=make.lokr()))

    def started_again() -> dict[str, float]:
        patched = original(ours)
        first = flux.sample(patched)
        flux.sample(parallel(FLUX, pipe=1, devices="cpu"))  # on other devices, so the ranks are others
        return {"difference": difference(first, flux.sample(patched)), "moved": difference(first, flux.plain)}

    results.case("ranks started again", started_again)
    flux.removed("removed")


def of_another_size(flux: Comparison) -> None:
    """Files with layers that do not fit: all but those are applied, or the whole file is refused by name."""
    make, results, told = flux.make, flux.results, Told()
    layers = [name for name, shape in make.targets("original") if shape == SQUARE]
    tensors = {}
    for name, shape in make.targets("original"):
        if name not in layers:
            tensors |= make.low_rank(name, shape, "original")
    for name, kind in zip(layers, LEFT_OUT.values(), strict=False):
        tensors |= {f"{name}.{key}": value for key, value in kind.items()}
    file, kinds = make.save("unfit", tensors), min(len(layers), len(LEFT_OUT))

    def left_out() -> dict:
        told.texts.clear()
        found = flux.compare(partial(with_lora, file=file))
        return found | {"told": [text for text in told.texts if "left out" in text], "kinds": kinds}

    results.case("left out", left_out)
    for kind, tensors in ({"none fits": LEFT_OUT["LoRA"]} | FAILING).items():
        results.case(f"refusal {kind}", partial(with_lora, flux.ours, make.one(f"failing {kind}", tensors)))


def enlarging(flux: Comparison) -> None:
    """A LoRA that enlarges the first layer, for a picture in further channels."""
    picture = torch.randn(1, 16, 12, 16, generator=torch.Generator().manual_seed(7))
    shown = [[[text, values | {"concat_latent_image": picture}] for text, values in prompt] for prompt in flux.prompts]
    control = partial(with_lora, file=flux.make.control())
    for name, ours in (("", lambda model: model), (", tensor", over_tensor)):
        flux.case(f"enlarging{name}", control, ours=ours, texts=lambda: shown)
    flux.removed("enlarging and not")


def hooks(flux: Comparison, first: str) -> None:
    """LoRAs in conditionings."""
    positive, negative = flux.prompts
    second = flux.make.whole("original", " 2")

    def for_each() -> list:
        return [with_hooks(positive, hook(first)), with_hooks(negative, hook(second, 0.7))]

    def over_a_region() -> list:
        """The left half of the picture, and a prompt without it for all of the rest."""
        left = torch.zeros(1, 12, 16)
        left[..., :8] = 1.0
        return [node("ConditioningSetDefaultCombine", with_hooks(positive, hook(first), left), negative), negative]

    flux.case("a hook for each", texts=for_each)
    flux.case("keyframes", texts=lambda: [with_hooks(positive, scheduled(hook(first), 0.0, 1.0, 0.25)), negative])
    flux.case("hook of a region", texts=over_a_region)
    flux.case("hooks beside a LoRA", partial(with_lora, file="differences.safetensors", strength=0.5), texts=for_each)
    flux.case("hooks under PipeFusion", ours=lambda model: node("ApplyPipeFusion", model, 4, 1, True), texts=for_each)

    flux.removed("hooks gone")
    dora = flux.make.one("DoRA in a hook", dora_of(flux.make))
    for name, file in (("enlarging", "failing enlarging.safetensors"), ("DoRA", dora)):
        texts = [with_hooks(text, hook(file)) for text in flux.prompts]
        flux.results.case(f"refusal of {name} in a hook", lambda texts=texts: flux.sample(flux.ours, texts))


def dora_of(make: Maker) -> dict[str, torch.Tensor]:
    factors = {"lora_B.weight": make.random(WIDTH, RANK), "lora_A.weight": 0.1 * make.random(RANK, WIDTH)}
    return factors | {"dora_scale": make.random(WIDTH, 1).abs()}


def bypass(flux: Comparison, first: str) -> None:
    """LoRAs in bypass mode."""
    for kind, file in {"LoRA": first, "LoKr": "LoKr.safetensors", "DoRA": "DoRA in a hook.safetensors"}.items():
        flux.case(f"bypass of {kind}", partial(bypassed, file=file))

    def taken_away() -> dict[str, float]:
        """A MODEL that has another LoRA left."""
        beside = with_lora(flux.ours, "differences.safetensors", 0.5)
        model = bypassed(beside, first)
        flux.sample(model)
        for key in list(model.injections):
            model.remove_injections(key)
        return {"difference": difference(flux.sample(beside), flux.sample(model))}

    flux.results.case("bypass gone", taken_away)
    oft = flux.make.one("OFT in bypass", {"oft_blocks": torch.ones(8, WIDTH // 8, WIDTH // 8)})
    flux.results.case("refusal of OFT in bypass mode", partial(bypassed, flux.ours, oft))


def merges(flux: Comparison, lora: str) -> None:
    """Merges, and LoRAs that depend on the weights themselves; saving and extracting what comes of them."""
    from comfy_extras.nodes_lora_extract import LoraSave

    make, g, state = flux.make, torch.Generator().manual_seed(9), load_file(MODELS / FLUX)
    others = {
        key: value + 0.5 * value.std().nan_to_num(0.1) * torch.randn(value.shape, generator=g)
        for key, value in state.items()
    }
    save_file(others, MODELS / f"other-{FLUX}")
    other = {flux.native: native_model(f"other-{FLUX}"), flux.ours: parallel(f"other-{FLUX}")}

    def with_loras(one, other):
        return with_lora(merge(with_lora(one, lora, 0.5), with_lora(other, lora, -0.7)), lora, 0.4)

    flux.case("merge with LoRAs", lambda one: with_loras(one, other[one]))
    flux.case(
        "subtracted and added", lambda one: node("ModelMergeAdd", one, node("ModelMergeSubtract", other[one], one, 0.6))
    )
    flux.case("DoRA", partial(with_lora, file=make.one("DoRA", dora_of(make))))
    flux.case("set", partial(with_lora, file=make.one("set", {"set_weight": 0.1 * make.random(*SQUARE)})))

    def multiplied(one):
        """A factor on some weights, and nothing added, as the attention multiply nodes have it."""
        clone = one.clone()
        keys = [key for key in one.model.state_dict() if key.endswith("qkv.weight")]
        assert sorted(clone.add_patches(dict.fromkeys(keys, (None,)), 0.0, 0.4)) == sorted(keys)
        return clone

    flux.case("factors", multiplied)
    native_other = other[flux.native]
    flux.case("merge over tensor_parallel_degree 2", lambda one: merge(one, native_other), ours=over_tensor)

    def same(save: Callable) -> dict[str, int]:
        """Tensors of the files that `save` writes of the native models and of ours, and how many are the same."""
        expected, found = (saved(save, one) for one in (flux.native, flux.ours))
        assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
        return {"keys": len(expected), "same": sum(close(expected[key], found[key]) for key in expected)}

    def save_model(one, file: str) -> None:
        nodes.NODE_CLASS_MAPPINGS["ModelSave"]().save(with_loras(one, other[one]), file)

    def save_lora(one, file: str) -> None:
        LoraSave.execute(file, 4, "standard", True, node("ModelMergeSubtract", other[one], one, 1.0))

    for save in (save_model, save_lora):
        flux.results.case(save.__name__, partial(same, save))
    quantised = state | {f"{LAYER}.weight": state[f"{LAYER}.weight"].to(torch.float8_e4m3fn)}
    quantised |= {f"{LAYER}.scale_weight": torch.ones(()), "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    save_file(quantised, MODELS / "quantised.safetensors")
    model = parallel("quantised.safetensors")
    flux.results.case("refusal of saving", lambda: nodes.NODE_CLASS_MAPPINGS["ModelSave"]().save(model, "quantised"))
    flux.results.case("refusal of merging", lambda: merge(model, model, 0.5))


def saved(save: Callable, one) -> dict[str, torch.Tensor]:
    """The newest file after `save`."""
    save(one, f"{save.__name__}-{len(list(files_saved()))}")
    return load_file(max(files_saved(), key=lambda path: path.stat().st_mtime_ns))


def files_saved() -> list[Path]:
    return list((BASE / "output").glob("**/*.safetensors"))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=1e-6, rtol=1e-3)
