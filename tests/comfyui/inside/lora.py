"""LoRA on Parallel DiT Loader's MODEL against LoRA on ComfyUI's own. Run by serve.py.

The LoRA files are made from ComfyUI's own table of names, so that they have every name that it knows.
"""

import logging
from collections.abc import Callable
from functools import partial

from boot import BASE, Results, comfy, difference, ksampler, node, parallel, torch
from safetensors.torch import save_file

FILES = {"Flux": "tiny.safetensors", "SD3": "tiny-sd3.safetensors"}
FORMATS = {"kohya": "lora_unet_", "diffusers": "transformer.", "original": "diffusion_model."}
RANK = 4


class Maker:
    """Writes LoRA files for a native MODEL into ComfyUI's folder."""

    def __init__(self, family: str, model):
        self.family = family
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
        file = f"{self.family} {name}.safetensors"
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, BASE / "models" / "loras" / file)
        return file

    def whole(self, form: str, copy: str = "") -> str:
        """A file with a LoRA for everything."""
        tensors = {}
        for name, shape in self.targets(form):
            tensors |= self.low_rank(name, shape, form)
        return self.save(form + copy, tensors)

    def partly(self) -> str:
        """A file whose first layer is of another size."""
        tensors, targets = {}, self.targets("original")
        for number, (name, shape) in enumerate(targets):
            tensors |= self.low_rank(name, shape if number else torch.Size((shape[0] // 2, *shape[1:])), "original")
        return self.save("partly", tensors)

    def differences(self) -> str:
        """Differences of weights, norms and biases, in full."""
        tensors, form = {}, "original"
        for name, shape in self.targets(form, lambda shape: True):
            if name.endswith(".bias"):
                continue
            tensors[f"{name}.diff"] = 0.1 * self.random(*shape) / shape[1:].numel() ** 0.5
            if (bias := self.shapes.get(f"{name}.bias")) is not None:
                tensors[f"{name}.diff_b"] = 0.1 * self.random(*bias)
        return self.save("differences", tensors)

    def matrices(self, kind: str, make: Callable[[torch.Size], dict[str, torch.Tensor]]) -> str:
        """One of the other kinds for every second matrix."""
        tensors = {}
        for name, shape in self.targets("original", lambda shape: len(shape) == 2)[::2]:
            tensors |= {f"{name}.{key}": value for key, value in make(shape).items()}
        return self.save(kind, tensors)

    def loha(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        small = (0.3 / shape[1] ** 0.5 / RANK) ** 0.5
        return {
            f"hada_w{index}_{side}": small**0.5 * self.random(*size)
            for index in (1, 2)
            for side, size in (("a", (shape[0], RANK)), ("b", (RANK, shape[1])))
        } | {"alpha": torch.tensor(2.0)}

    def lokr(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        rows, columns = shape[0] // 4, shape[1] // 4
        small = 0.3 / (shape[1] * RANK) ** 0.5
        return {
            "lokr_w1": self.random(4, 4),
            "lokr_w2_a": self.random(rows, RANK),
            "lokr_w2_b": small * self.random(RANK, columns),
            "alpha": torch.tensor(3.0),
        }

    def locon(self) -> str:
        width, channels, *side = self.shapes["diffusion_model.x_embedder.proj.weight"]
        up, mid, down = self.random(width, RANK, 1, 1), self.random(RANK, RANK, *side), self.random(RANK, channels, 1, 1)
        factors = {"up": 0.1 * up, "mid": 0.1 * mid, "down": down}
        return self.save("LoCon", {f"lora_unet_x_embedder_proj.lora_{key}.weight": value for key, value in factors.items()})

    def one(self, kind: str, tensors: dict[str, torch.Tensor]) -> str:
        """A file of some kind for one layer."""
        layer = {"Flux": "double_blocks.0.img_attn.proj", "SD3": "joint_blocks.0.x_block.attn.proj"}[self.family]
        return self.save(kind, {f"diffusion_model.{layer}.{key}": value for key, value in tensors.items()})


def with_lora(model, file: str, strength: float = 1.0):
    return node("LoraLoaderModelOnly", model, file, strength)


def compare_family(family: str, results: Results) -> None:
    path = BASE / "models" / "diffusion_models" / FILES[family]
    native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
    ours = parallel(FILES[family], stage_split="even")
    make = Maker(family, native)
    g = torch.Generator().manual_seed(0)
    prompts = [[[torch.randn(1, 9, 64, generator=g), {"pooled_output": torch.randn(1, 32, generator=g)}]] for _ in range(2)]

    def sample(model, texts=prompts) -> torch.Tensor:
        return ksampler(model, texts, torch.zeros(1, 16, 12, 16), steps=3)

    with torch.inference_mode():
        before = sample(ours)

    def case(name: str, measure: Callable) -> None:
        results.case(f"{family}, {name}", measure)

    def compare(change: Callable, more: Callable = lambda model: model) -> dict[str, float]:
        expected = sample(change(native))
        found = sample(more(change(ours)))
        return {"difference": difference(expected, found), "moved": difference(expected, before)}

    loras = {form: make.whole(form) for form in FORMATS}
    other = make.whole("original", " too")
    both = (native.model, ours.model)
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in both]
    case("names and shapes", lambda: {"same": shapes[0] == shapes[1], "count": len(shapes[0])})
    names = [comfy.lora.model_lora_keys_unet(model, {}) for model in both]
    case("LoRA names", lambda: {"same": names[0] == names[1], "count": len(names[0])})
    case("memory", lambda: {"bytes": ours.model_size(), "native": native.model_size()})
    for form, file in loras.items():
        case(form, partial(compare, partial(with_lora, file=file)))
    original = partial(with_lora, file=loras["original"])
    case("all steps warm-up", lambda: compare(original, lambda model: node("ApplyPipeFusion", model, 4, 1000, True)))
    case(
        "Apply PipeFusion before",
        lambda: {
            "difference": difference(
                sample(original(native)), sample(original(node("ApplyPipeFusion", ours, 4, 1000, True)))
            )
        },
    )

    def with_text_encoder(model):
        """As a LoRA loader with a CLIP does it: the text encoder's patches come along."""
        clone, (factors, *_) = original(model), original(model).patches["diffusion_model.final_layer.linear.weight"]
        assert clone.add_patches({"clip_l.text_projection.weight": factors[1]}) == []
        return clone

    case("text encoder's patches", partial(compare, with_text_encoder))
    case("weaker", lambda: compare(lambda model: with_lora(model, loras["original"], 0.4)))
    case("negative", lambda: compare(lambda model: with_lora(model, loras["original"], -0.3)))
    case("removed", lambda: {"difference": difference(before, sample(ours))})
    case("two on one another", lambda: compare(lambda model: with_lora(original(model), other, 0.5)))
    case("differences", lambda: compare(partial(with_lora, file=make.differences())))
    case("LoHa", lambda: compare(partial(with_lora, file=make.matrices("LoHa", make.loha))))
    case("LoKr", lambda: compare(partial(with_lora, file=make.matrices("LoKr", make.lokr))))

    def alternately() -> dict[str, float]:
        models = [(original(model), with_lora(model, other)) for model in (native, ours)]
        expected = [sample(model) for model in models[0]]
        rounds = [[sample(model) for model in models[1]] for _ in range(2)]
        return {
            "difference": max(difference(a, b) for found in rounds for a, b in zip(expected, found, strict=True)),
            "repeat": max(difference(a, b) for a, b in zip(*rounds, strict=True)),
            "apart": difference(*expected),
        }

    case("two clones in turn", alternately)

    def started_again() -> dict[str, float]:
        patched = original(ours)
        first = sample(patched)
        sample(parallel(FILES[family], pipe=1, devices="cpu"))  # on other devices, so the ranks are others
        return {"difference": difference(first, sample(patched)), "moved": difference(first, before)}

    case("ranks started again", started_again)
    case(
        "tensor_parallel_degree 2",
        lambda: {
            "difference": difference(sample(original(native)), sample(original(parallel(FILES[family], pipe=1, tensor=2))))
        },
    )
    if family == "SD3":  # Flux has no convolution
        case("LoCon with a third factor", lambda: compare(partial(with_lora, file=make.locon())))
    if family == "Flux":
        of_another_size(results, make, native, ours, sample, compare)
        enlarging(results, make, native, ours, prompts, before, loras["original"])
        refusals(results, make, ours, sample)
    case("after the refusals", lambda: {"difference": difference(before, sample(ours))})


WIDE, NARROW = torch.ones(256, RANK), torch.ones(RANK, 128)
LEFT_OUT = {  # for a weight of [256, 256]: a kind -> what ComfyUI leaves out, and only logs
    "LoRA": {"lora_B.weight": WIDE, "lora_A.weight": NARROW},
    "factors of a LoRA": {"lora_B.weight": torch.ones(256, 8), "lora_A.weight": torch.ones(RANK, 256)},
    "DoRA's scale": {"lora_up.weight": WIDE, "lora_down.weight": torch.ones(RANK, 256), "dora_scale": torch.ones(7, 1)},
    "LoHa": {f"hada_w{each}_{side}": size for each in (1, 2) for side, size in (("a", WIDE), ("b", NARROW))},
    "LoKr": {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(64, 32)},
    "GLoRA": {
        "a1.weight": torch.ones(RANK, 256),
        "a2.weight": torch.ones(256, RANK),
        "b1.weight": torch.ones(RANK, 256),
        "b2.weight": torch.ones(128, RANK),
    },
    "OFT": {"oft_blocks": torch.ones(8, 30, 30)},
    "BOFT": {"oft_blocks": torch.ones(2, 8, 30, 30), "alpha": torch.tensor(1e-3)},
    "BOFT without alpha": {"oft_blocks": torch.ones(2, 8, 32, 32)},
    "difference": {"diff": torch.ones(256, 128)},
    "difference of the bias": {"diff_b": torch.ones(128)},
}
FAILING = {  # what ComfyUI itself cannot compute with
    "factors of a LoHa": {
        "hada_w1_a": torch.ones(256, 8),
        "hada_w1_b": torch.ones(4, 256),
        "hada_w2_a": torch.ones(256, 8),
        "hada_w2_b": torch.ones(8, 256),
    },
    "factors of a LoKr": {"lokr_w1_a": torch.ones(4, 8), "lokr_w1_b": torch.ones(2, 4), "lokr_w2": torch.ones(64, 64)},
    "set": {"set_weight": torch.ones(256, 128)},
    "making smaller": {
        "lora_B.weight": WIDE,
        "lora_A.weight": torch.ones(RANK, 256),
        "reshape_weight": torch.tensor([256, 128]),
    },
}


SQUARE = torch.Size((256, 256))


def of_another_size(results: Results, make: Maker, native, ours, sample, compare) -> None:
    """Files with layers that do not fit: all but those are applied, or the whole file is refused by name."""
    told = Told()
    layers = [name for name, shape in make.targets("original") if shape == SQUARE]
    whole = {name: make.low_rank(name, shape, "original") for name, shape in make.targets("original")}
    for part in range(0, len(LEFT_OUT), len(layers)):
        kinds = list(LEFT_OUT)[part : part + len(layers)]
        tensors = {key: value for name, each in whole.items() if name not in layers for key, value in each.items()}
        for name, kind in zip(layers, kinds, strict=False):
            tensors |= {f"{name}.{key}": value for key, value in LEFT_OUT[kind].items()}
        file = make.save(f"unfit {part}", tensors)
        measure = partial(compare, partial(with_lora, file=file))
        results.case(f"left out {part}", lambda measure=measure, kinds=kinds: told.during(measure) | {"kinds": kinds})
    # A part of a fused layer, named as diffusers names it.
    block = "transformer.transformer_blocks.0.attn"
    parts = make.low_rank(f"{block}.to_q", SQUARE, "diffusers") | make.low_rank(
        f"{block}.to_k", torch.Size((128, 256)), "diffusers"
    )
    file = make.save("unfit part", parts)
    results.case("left out part", lambda: told.during(lambda: compare(partial(with_lora, file=file))))
    over_tensor = partial(parallel, FILES["Flux"], pipe=1, tensor=2)
    results.case(
        "left out part, tensor_parallel_degree 2",
        lambda: {"difference": difference(sample(with_lora(native, file)), sample(with_lora(over_tensor(), file)))},
    )
    results.case("refusal none fits", partial(with_lora, ours, make.one("none fits", LEFT_OUT["LoRA"])))
    for kind, tensors in FAILING.items():
        results.case(f"refusal {kind}", partial(with_lora, ours, make.one(f"failing {kind}", tensors)))


class Told(logging.Handler):
    """Collects this pack's warnings."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record):
        if record.getMessage().startswith("Parallel DiT: "):
            self.lines.append(record.getMessage())

    def during(self, work: Callable[[], dict]) -> dict:
        self.lines.clear()
        return work() | {"told": [line for line in self.lines if "left out" in line]}


def control_lora(make: Maker) -> str:
    """As Black Forest Labs' LoRAs for depth and canny: for everything, with a first layer for twice the channels."""
    tensors = {}
    for name, shape in make.targets("original"):
        layer = name.removeprefix(FORMATS["original"])
        if layer == "img_in":
            shape = torch.Size((shape[0], 2 * shape[1]))
        tensors |= {
            f"{layer}.{key.removeprefix(name)[1:]}": value for key, value in make.low_rank(name, shape, "diffusers").items()
        }
        if (bias := make.shapes.get(f"{name}.bias")) is not None:
            tensors[f"{layer}.lora_B.bias"] = 0.1 * make.random(*bias)
    for key, shape in make.shapes.items():
        if "_norm." in key:
            tensors[key.removeprefix("diffusion_model.").rpartition(".")[0] + ".scale"] = 1 + 0.1 * make.random(*shape)
    return make.save("control", tensors)


def enlarging(results: Results, make: Maker, native, ours, prompts, before, plain: str) -> None:
    """A LoRA that enlarges the first layer, for a picture in further channels."""
    file = control_lora(make)
    g = torch.Generator().manual_seed(7)
    picture = torch.randn(1, 16, 12, 16, generator=g)
    shown = [[[text, values | {"concat_latent_image": picture}] for text, values in prompt] for prompt in prompts]

    def sample(model, conditioning=shown) -> torch.Tensor:
        return ksampler(model, conditioning, torch.zeros(1, 16, 12, 16), steps=3)

    def compare(change: Callable, more: Callable = lambda model: model) -> dict[str, float]:
        expected, found = sample(change(native)), sample(more(change(ours)))
        return {"difference": difference(expected, found), "moved": difference(expected, before)}

    control = partial(with_lora, file=file)
    first = partial(with_lora, file=plain)
    results.case("enlarging", lambda: compare(control))
    results.case(
        "enlarging, all steps warm-up", lambda: compare(control, lambda model: node("ApplyPipeFusion", model, 4, 1000, True))
    )
    results.case("enlarging behind a LoRA of the first layer", lambda: compare(lambda model: control(first(model))))
    results.case("enlarging before a LoRA of the first layer", lambda: compare(lambda model: first(control(model))))
    results.case("enlarging and not", lambda: {"difference": difference(before, sample(ours, prompts))})
    tensor = partial(parallel, FILES["Flux"], pipe=1, tensor=2)
    results.case(
        "enlarging, tensor_parallel_degree 2",
        lambda: {"difference": difference(sample(control(native)), sample(control(tensor())))},
    )
    results.case("refusal enlarging", partial(with_lora, ours, make.one("enlarging", ENLARGING)))


ENLARGING = {
    "lora_B.weight": WIDE,
    "lora_A.weight": torch.ones(RANK, 512),
    "reshape_weight": torch.tensor([256, 512]),
}


def refusals(results: Results, make: Maker, ours, sample) -> None:
    """What cannot be sent to the ranks: by which words it is refused."""
    results.case("refusal weight wrapper", lambda: ours.clone().add_weight_wrapper("a", abs))
    injection = comfy.patcher_extension.PatcherInjection(inject=lambda patcher: None, eject=lambda patcher: None)
    results.case("refusal injection", lambda: ours.clone().set_injections("of another node", [injection]))


def main(results: Results) -> None:
    for family in FILES:
        compare_family(family, results)
