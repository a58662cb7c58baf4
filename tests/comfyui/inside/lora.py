"""LoRA on Parallel DiT Loader's MODEL against LoRA on ComfyUI's own. Run by serve.py.

The LoRA files are made from ComfyUI's own table of names, so that they have every name that it knows.
"""

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
        save_file({key: value.contiguous() for key, value in tensors.items()}, BASE / "models" / "loras" / file)
        return file

    def whole(self, form: str, copy: str = "") -> str:
        """A file with a LoRA for everything."""
        tensors = {}
        for name, shape in self.targets(form):
            tensors |= self.low_rank(name, shape, form)
        return self.save(form + copy, tensors)

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
        refusals(results, make, ours, sample)
    case("after the refusals", lambda: {"difference": difference(before, sample(ours))})


UNFIT_LOKR = {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(64, 32)}


def refusals(results: Results, make: Maker, ours, sample) -> None:
    """What cannot be sent to the ranks: by which words it is refused."""
    up, down = torch.ones(256, RANK), torch.ones(RANK, 256)
    files = {
        "enlarging": {"lora_B.weight": up, "lora_A.weight": down, "reshape_weight": torch.tensor([256, 512])},
        "other width": {"lora_B.weight": up, "lora_A.weight": torch.ones(RANK, 128)},
        "factors": {"lora_B.weight": torch.ones(256, 8), "lora_A.weight": down},
        "factors of a LoHa": {
            "hada_w1_a": torch.ones(256, 8),
            "hada_w1_b": torch.ones(4, 256),
            "hada_w2_a": torch.ones(256, 8),
            "hada_w2_b": torch.ones(8, 256),
        },
        "factors of a LoKr": {
            "lokr_w1_a": torch.ones(4, 8),
            "lokr_w1_b": torch.ones(2, 4),
            "lokr_w2": torch.ones(64, 64),
        },
        "other difference": {"diff": torch.ones(256, 128)},
        "other set": {"set_weight": torch.ones(256, 128)},
    }
    for kind, tensors in files.items():
        file = make.one(kind, tensors)
        results.case(f"refusal {kind}", partial(with_lora, ours, file))
    results.case("refusal unfit LoKr", partial(with_lora, ours, make.one("unfit LoKr", UNFIT_LOKR)))
    unfit = {
        "GLoRA": {
            "a1.weight": torch.ones(RANK, 256),
            "a2.weight": torch.ones(256, RANK),
            "b1.weight": torch.ones(RANK, 256),
            "b2.weight": torch.ones(128, 8),
        },
        "OFT": {"oft_blocks": torch.ones(8, 30, 30)},
    }
    for kind, tensors in unfit.items():
        file = make.one(f"unfit {kind}", tensors)
        results.case(f"refusal unfit {kind}", lambda file=file: sample(with_lora(ours, file)))
    results.case("refusal weight wrapper", lambda: ours.clone().add_weight_wrapper("a", abs))
    injection = comfy.patcher_extension.PatcherInjection(inject=lambda patcher: None, eject=lambda patcher: None)
    results.case("refusal injection", lambda: ours.clone().set_injections("of another node", [injection]))


def main(results: Results) -> None:
    for family in FILES:
        compare_family(family, results)
