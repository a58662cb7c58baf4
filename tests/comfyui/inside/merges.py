"""Merges, and LoRAs that depend on the weights themselves; saving and extracting what comes of them: Parallel DiT Loader's
MODEL against ComfyUI's own. Run by serve.py.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from boot import BASE, Results, comfy, difference, ksampler, node, nodes, parallel, torch
from lora import FILES, RANK, Maker, with_lora
from safetensors.torch import load_file, save_file

WIDTH = {"Flux": 256, "SD3": 192}
MODELS = BASE / "models" / "diffusion_models"


def main(results: Results, families: list[str]) -> None:
    from comfy_extras import nodes_attention_multiply, nodes_lora_extract, nodes_model_merging  # once ComfyUI is up

    nodes.NODE_CLASS_MAPPINGS.update(nodes_model_merging.NODE_CLASS_MAPPINGS)
    extract = nodes_lora_extract.LoraSave.execute
    multiply = nodes_attention_multiply.UNetSelfAttentionMultiply.execute
    for family in families:
        compare_family(family, results, extract, multiply)
    quantised = quantised_copy()
    results.case("refusal of saving", lambda: save_model(quantised, "quantised"))
    results.case("refusal of merging", lambda: node("ModelMergeSimple", quantised, quantised, 0.5))


def save_model(model, file: str) -> None:
    nodes.NODE_CLASS_MAPPINGS["ModelSave"]().save(model, file)


def loaded(name: str):
    return comfy.sd.load_diffusion_model(str(MODELS / name), model_options={"dtype": torch.float32})


def another(name: str) -> str:
    """A file of the same model with other weights."""
    g, state = torch.Generator().manual_seed(9), load_file(MODELS / name)
    state = {
        key: value + 0.5 * value.std().nan_to_num(0.1) * torch.randn(value.shape, generator=g)
        for key, value in state.items()
    }
    save_file(state, MODELS / f"other-{name}")
    return f"other-{name}"


def quantised_copy():
    """The tiny Flux with one weight in fp8 with a scale."""
    state = load_file(MODELS / FILES["Flux"])
    layer = "double_blocks.0.img_attn.proj"
    state[f"{layer}.weight"] = state[f"{layer}.weight"].to(torch.float8_e4m3fn)
    state[f"{layer}.scale_weight"], state["scaled_fp8"] = torch.ones(()), torch.empty(0, dtype=torch.float8_e4m3fn)
    save_file(state, MODELS / "quantised.safetensors")
    return parallel("quantised.safetensors")


def compare_family(family: str, results: Results, extract: Callable, multiply: Callable) -> None:
    name, width = FILES[family], WIDTH[family]
    other = another(name)
    native, native_other, ours, ours_other = loaded(name), loaded(other), parallel(name), parallel(other)
    make, g = Maker(family, native), torch.Generator().manual_seed(0)
    prompts = [[[torch.randn(1, 9, 64, generator=g), {"pooled_output": torch.randn(1, 32, generator=g)}]] for _ in range(2)]
    lora = make.whole("original")

    def sample(model) -> torch.Tensor:
        return ksampler(model, prompts, torch.zeros(1, 16, 12, 16), steps=3)

    plain, before = sample(native), sample(ours)

    def case(name: str, change: Callable, sources: tuple = (ours, ours_other)) -> None:
        """`change` makes a MODEL of the one and the other."""

        def compare() -> dict[str, float]:
            expected, found = sample(change(native, native_other)), sample(change(*sources))
            return {"difference": difference(expected, found), "moved": difference(expected, plain)}

        results.case(f"{family}, {name}", compare)

    def merge(one, other, ratio: float = 0.3):
        return node("ModelMergeSimple", one, other, ratio)

    def with_loras(one, other):
        return with_lora(merge(with_lora(one, lora, 0.5), with_lora(other, lora, -0.7)), lora, 0.4)

    def by_blocks(one, other):
        ratios = {"": 0.9, "double_blocks.": 0.2, "joint_blocks.": 0.6, "joint_blocks.1": 0.0, "final_layer.": 0.5}
        return node("ModelMergeBlocks", one, other, **ratios)

    def there_and_back(one, other):
        return node("ModelMergeAdd", one, node("ModelMergeSubtract", other, one, 0.6))

    case("merge", merge)
    case("merge of ours into the native", merge, (native, ours_other))
    case("merge of the native into ours", merge, (ours, native_other))
    case("merge with LoRAs", with_loras)
    case("merge by blocks", by_blocks)
    case("subtracted and added", there_and_back)
    factors = {"lora_B.weight": make.random(width, RANK), "lora_A.weight": 0.1 * make.random(RANK, width)}
    blocks = 0.2 * make.random(8, width // 8, width // 8)
    files = {
        "DoRA": factors | {"dora_scale": make.random(width, 1).abs()},
        "OFT": {"oft_blocks": blocks - blocks.transpose(1, 2)},
        "BOFT": {"oft_blocks": torch.stack([blocks - blocks.transpose(1, 2)] * 2), "alpha": torch.tensor(10.0)},
        "GLoRA": {f"{part}.weight": 0.1 * make.random(*shape) for part, shape in glora(width).items()},
        "set": {"set_weight": 0.1 * make.random(width, width)},
    }
    for kind, tensors in files.items():
        file = make.one(kind, tensors)
        case(kind, lambda one, _other, file=file: with_lora(one, file))

    def multiplied(one, _other):
        """A factor on some weights, and nothing added, as the attention multiply nodes have it."""
        clone = one.clone()
        keys = [key for key in one.model.state_dict() if key.endswith("qkv.weight")]
        assert sorted(clone.add_patches(dict.fromkeys(keys, (None,)), 0.0, 0.4)) == sorted(keys)
        return clone

    case("factors", multiplied)
    results.case(f"{family}, removed", lambda: {"difference": difference(before, sample(ours))})
    cut = parallel(name, pipe=1, tensor=2)
    case("merge over tensor_parallel_degree 2", merge, (cut, native_other))

    def same(save: Callable) -> dict[str, int]:
        """Tensors of the files that `save` writes of the native models and of ours, and how many are the same."""
        files = []
        for index, pair in enumerate(((native, native_other), (ours, ours_other))):
            save(*pair, f"{family}-{len(list((BASE / 'output').glob('**/*.safetensors')))}-{index}")
            files.append(load_file(newest()))
        expected, found = files
        assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
        return {"keys": len(expected), "same": sum(close(expected[key], found[key]) for key in expected)}

    saves = {
        "ModelSave": lambda one, _other, file: save_model(with_lora(one, lora), file),
        "ModelSave of a merge": lambda one, other, file: save_model(with_loras(one, other), file),
        "LoraSave": lambda one, other, file: extract(file, 4, "standard", True, node("ModelMergeSubtract", other, one, 1.0)),
        "LoraSave of whole differences": lambda one, other, file: extract(
            file, 4, "full_diff", False, node("ModelMergeSubtract", other, one, 1.0)
        ),
    }
    for kind, save in saves.items():
        results.case(f"{family}, {kind}", partial(same, save))


def glora(width: int) -> dict[str, tuple[int, int]]:
    return {"a1": (RANK, width), "a2": (width, RANK), "b1": (RANK, width), "b2": (width, RANK)}


def newest() -> Path:
    return max((BASE / "output").glob("**/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=1e-6, rtol=1e-3)
