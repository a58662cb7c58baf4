"""ComfyUI's quantised formats: what a file says is what a rank has, bit for bit, and a damaged file is refused by name.

Files are made by comfy-kitchen's quantisers, and expected values by its own expansion and products.
"""

from pathlib import Path

import comfy_kitchen
import pytest
import torch
import torch.nn.functional as F
from comfy_kitchen.tensor import QuantizedTensor
from safetensors.torch import load_file, save_file
from torch import nn

from parallel_backend.checkpoints import quantised_formats
from parallel_backend.checkpoints.checkpoint import Checkpoint, open_own_class
from parallel_backend.checkpoints.quantised_formats import FORMATS
from parallel_backend.checkpoints.reader import reading
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.kitchen import Kitchen
from parallel_backend.core.spans import Shard, Span
from parallel_backend.rank.stage import quantised_products
from parallel_backend.rank.stage.linear import PackedLinear
from testing import mini
from testing.quantised import KINDS, marked, quantise_blocks, quantised, settings
from tests.checkpoints.test_formats import loaded

CONFIG = mini.IN_COMFYUI | {"axes": (8, 28, 28), "single_blocks": 2, "pooled_width": 64}
CPU = torch.device("cpu")
LAYER, PROJ = "double_blocks.1.img_attn.qkv", "double_blocks.1.img_attn.proj"


def opened(path: Path, tensor: int = 1) -> Checkpoint:
    return open_own_class(path, mini.proven(CONFIG, tensor))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return load_file(mini.save(mini.random_model(CONFIG), tmp_path_factory.mktemp("whole") / "whole.safetensors"))


@pytest.fixture(scope="module")
def files(whole, tmp_path_factory):
    """`files(kind)`: (the file, the values that it stands for)."""
    folder, made = tmp_path_factory.mktemp("quantised"), {}

    def make(kind: str):
        if kind not in made:
            tensors, values = quantise_blocks(whole, kind)
            path = folder / f"{len(made)}.safetensors"
            save_file(tensors, path)
            made[kind] = path, values
        return made[kind]

    return make


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_comfy_kitchens_and_stay_as_small_as_in_the_file(files, kind):
    path, values = files(kind)
    checkpoint, model = opened(path), loaded(path)
    layers = packed_layers(model)
    assert len(layers) > 10
    for name, layer in layers.items():
        expected = values[f"{name}.weight"]
        assert torch.equal(layer.weight, expected), name
        assert layer.weight_shape == tuple(expected.shape)
    held = sum(layer.nbytes for layer in layers.values())
    plain = sum(p.nbytes for name, p in model.named_parameters() if not name.endswith(".packed"))
    assert held + plain < 1.02 * path.stat().st_size
    foretold = sum(checkpoint.nbytes(f"{name}.weight", "fp32") for name in layers)
    assert foretold == pytest.approx(held, rel=0.03)  # the parts of a fused layer each have whole tiles


def as_comfyui(path, layer: str, kind: str) -> QuantizedTensor:
    """A layer's weight as ComfyUI makes it of the file: comfy/ops.py `_load_quantized_module`."""
    file = load_file(path)
    weight, scale = file[f"{layer}.weight"], file.get(f"{layer}.weight_scale")
    other = quantised(torch.zeros(256, 256), kind)
    fields = {name: getattr(other._params, name) for name in vars(other._params)}
    match KINDS[kind][0]:
        case "nvfp4":
            fields |= {"scale": file[f"{layer}.weight_scale_2"], "block_scale": scale.view(torch.float8_e4m3fn)}
        case "mxfp8":
            fields |= {"scale": scale.view(torch.float8_e8m0fnu)}
        case "asym_w4a8_int8" | "w6a8_int8":
            fields |= {"scale": file[f"{layer}.weight_s_rel"], "s_channel": file[f"{layer}.weight_s_channel"]}
            fields |= {"codebook": file.get(f"{layer}.weight_codebook")}
        case "awq_w4a16":
            fields |= {"scale": scale, "zeros": file[f"{layer}.weight_zeros"]}
        case _:
            fields |= {"scale": scale}
    return QuantizedTensor(weight, other._layout_cls, type(other._params)(**fields))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Every format is multiplied in. comfy-kitchen then finds that its kernels for blocks do not run here, and takes its own
    way out: it multiplies the rounded input by the expanded weight."""

    def refuse(*_, **__):
        raise RuntimeError("no such kernel on a CPU")

    monkeypatch.setattr(quantised_products, "_obstacle", lambda *_: "")
    monkeypatch.setattr(quantised_products, "trial", lambda *_: "")
    for name in ("scaled_mm_nvfp4", "scaled_mm_mxfp8"):
        monkeypatch.setattr(comfy_kitchen, name, refuse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forced", [False, True], ids=["on this device", "as on a GPU"])
def test_a_layers_product_is_comfy_kitchens_own(files, request, kind, forced):
    path, _ = files(kind)
    if forced:
        request.getfixturevalue("as_on_a_gpu")
    layer = loaded(path).get_submodule(PROJ)
    weight = as_comfyui(path, PROJ, kind)
    x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(0))
    rounds_input = KINDS[kind][0] in quantised_products.CAPABILITY
    with torch.inference_mode():  # on some CPUs a product with a bias has other bits outside of it
        if rounds_input and forced:
            given = {"scale": torch.ones(())} if kind == "fp8" else {}
            rounded = QuantizedTensor.from_float(x.reshape(-1, 256), weight._layout_cls, **given)
            expected = F.linear(rounded, weight, layer.bias).reshape(2, 5, -1)
        else:
            expected = F.linear(x, weight, layer.bias)
        assert torch.equal(layer(x), expected)
        assert layer(x[:, :0]).shape == (2, 0, 256)
        # The control: a product that rounds the input is another one.
        rounds = KINDS[kind][0] != "awq_w4a16" and (forced or not rounds_input)
        assert (mini.relative(layer(x), F.linear(x, layer.weight, layer.bias)) > 1e-3) == rounds


@pytest.mark.parametrize("broken", [RuntimeError, ValueError, None])
def test_a_product_that_comfy_kitchen_falls_back_from_is_called_no_product(files, monkeypatch, broken):
    """A kernel that raises is a line in the log to comfy-kitchen, at every product, and a rounded input for nothing.

    torch's own refusal of shapes and scales is a ValueError, from which comfy-kitchen does not fall back.
    """
    calls = []

    def kernel(rows, *others, **named):
        calls.append(rows.shape)
        if broken is not None:
            raise broken("cublasLt: not supported\nand more")
        return torch.zeros(len(rows), 256)

    monkeypatch.setattr(quantised_products, "_obstacle", lambda *_: "")
    monkeypatch.setattr(comfy_kitchen, "scaled_mm_nvfp4", kernel)
    quantised_products.trial.cache_clear()
    layer, x = loaded(files("nvfp4")[0]).get_submodule(PROJ), torch.randn(5, 256)
    assert len(calls) == 1  # one trial for all layers
    with torch.inference_mode():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias)) == (broken is not None)
    assert len(calls) == (2 if broken is None else 1)
    assert layer.arithmetic.word.startswith(f"nvfp4 {'multiplied' if broken is None else 'expanded'} ")
    quantised_products.trial.cache_clear()


def test_a_file_is_refused_without_the_package(files, monkeypatch):
    missing = Kitchen(None, "comfy-kitchen cannot be used (it is not there)")
    monkeypatch.setattr(quantised_formats, "kitchen", lambda: missing)
    with pytest.raises(ValueError, match=r"^model_name: .* as int8_tensorwise, which needs comfy-kitchen: .*not there"):
        opened(files("int8, rotated")[0])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_weight(files, kind):
    """Rows of a fused layer, in any order; columns in whole groups stay packed, others are expanded and cut."""
    path, values = files(kind)
    checkpoint = opened(path)
    entry = checkpoint.entries[f"{LAYER}.weight"]
    weight, unit = values[f"{LAYER}.weight"], entry.layer.unit
    shards = [Shard(0, spans) for spans in ((Span(3, 40), Span(64, 65)), (Span(128, 256), Span(0, 128)))]
    inner = Span(0, 256) if unit == 256 else Span(unit, 3 * unit)
    shards += [Shard(1, (inner,)), Shard(1, (Span(128, 256), Span(0, 64))), Shard(1, (Span(3, 70),))]
    with reading(checkpoint) as reader:
        for shard in shards:
            expected = torch.cat([weight.narrow(shard.dim, span.start, len(span)) for span in shard.spans], shard.dim)
            assert torch.equal(reader.values(f"{LAYER}.weight", torch.float32, shard, CPU), expected)
            inside = shard.dim == 0 or all(edge % unit == 0 for span in shard.spans for edge in (span.start, span.stop))
            assert reader.packable(f"{LAYER}.weight", entry.dtype, shard) == inside
            if inside:
                packed, packing = reader.packed(f"{LAYER}.weight", entry.dtype, shard, CPU)
                assert torch.equal(packing.expand(packed, torch.float32), expected)
                assert packed.nbytes == expected.numel() * entry.layer.bits // 8


def six_bits() -> dict[str, torch.Tensor]:
    """A file's tensors of the layer PROJ [256, 256] in w6a8_int8."""
    said = {"format": "w6a8_int8", "group_size": 16, "convrot": True, "convrot_groupsize": 64}
    groups = torch.ones(256, 256 // 16).to(torch.float8_e4m3fn)
    made = {"weight": torch.ones(256, 192, dtype=torch.int8), "weight_s_rel": groups, "weight_s_channel": torch.ones(256)}
    return {f"{PROJ}.{leaf}": tensor for leaf, tensor in (made | {"comfy_quant": marked(said)}).items()}


def test_six_bits_need_a_comfy_kitchen_that_knows_them(whole, tmp_path, monkeypatch):
    save_file(whole | six_bits(), path := tmp_path / "six.safetensors")
    if quantised_formats.kitchen_lacks("w6a8_int8"):
        with pytest.raises(ValueError, match=r"as w6a8_int8, which needs comfy-kitchen: this comfy-kitchen .* too old"):
            opened(path)
    monkeypatch.setattr("parallel_backend.checkpoints.checkpoint.kitchen_lacks", lambda _format: "")
    assert opened(path, tensor=2).tensor_degrees == {1}


def drop(leaf: str):
    return lambda tensors: {key: value for key, value in tensors.items() if key != f"{LAYER}.{leaf}"}


def put(leaf: str, value: torch.Tensor):
    return lambda tensors: tensors | {f"{LAYER}.{leaf}": value}


def says(kind: str, **more: object):
    return put("comfy_quant", marked(settings(kind, **more)))


def half(leaf: str):
    """A tensor whose second half is lost."""
    return lambda tensors: tensors | {f"{LAYER}.{leaf}": tensors[f"{LAYER}.{leaf}"].flatten(1)[: 768 // 2].contiguous()}


INT8, FP4, FP8, W4A4, W4A8, W4A16 = "int8, rotated", "nvfp4", "mxfp8", "w4a4", "w4a8", "w4a16"
BROKEN = {
    "int8, no scale": (INT8, drop("weight_scale"), "lacks .*qkv.weight_scale"),
    "int8, half of the scales": (INT8, half("weight_scale"), r"has .*weight_scale as fp32 of shape \[384, 1\]"),
    "int8, another rotation": (INT8, says(INT8, convrot_groupsize=32), "has convrot_groupsize 32"),
    "int8, a rotation that is a list": (INT8, says(INT8, convrot_groupsize=[64]), r"has convrot_groupsize \[64\]"),
    "nvfp4, no scale of all": (FP4, drop("weight_scale_2"), "lacks .*qkv.weight_scale_2"),
    "nvfp4, half of the scales": (FP4, half("weight_scale"), r"has .*weight_scale as fp8_e4m3fn of shape \[384, 16\]"),
    "mxfp8, no scales": (FP8, drop("weight_scale"), "lacks .*qkv.weight_scale"),
    "w4a4, another product": (W4A4, says(W4A4, linear_dtype="int2"), "linear_dtype int2"),
    "w4a8, other groups": (W4A8, says(W4A8, group_size=32), "has .*weight_s_rel as fp8_e4m3fn"),
    "w4a8, a codebook of eight": (W4A8, put("weight_codebook", torch.ones(8)), "has .*weight_codebook as fp32"),
    "w4a16, no scales": (W4A16, drop("weight_scale"), "lacks .*qkv.weight_scale"),
    "w4a16, other groups": (W4A16, says(W4A16, group_size=128), r"has .*weight_scale as fp32 of shape \[4, 768\]"),
    "a format that is no text": (INT8, put("comfy_quant", marked({"format": ["int8_tensorwise"]})), "in the format \\["),
    "an unknown format": (INT8, put("comfy_quant", marked({"format": "svdquant_w4a4"})), "in the format svdquant_w4a4"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_is_refused_by_name(files, tmp_path, case):
    kind, edit, message = BROKEN[case]
    save_file(edit(load_file(files(kind)[0])), tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match=f"^model_name: broken.safetensors .*{message}"):
        opened(tmp_path / "broken.safetensors")


def test_every_format_has_a_damaged_file():
    """fp8's are in test_formats.py, those of six bits above."""
    others = {"float8_e4m3fn", "float8_e5m2", "w6a8_int8"}
    assert {KINDS[kind][0] for kind, _, _ in BROKEN.values()} == set(FORMATS) - others


@pytest.mark.parametrize("kind", ["int8, rotated", "nvfp4"])
def test_a_tensor_degree_that_cuts_groups_apart_is_refused(whole, files, kind):
    """Four heads of 64 columns: three ranks have two, one and one, the feed-forward's 1,024 columns in thirds."""
    checkpoint = opened(files(kind)[0], tensor=2)
    assert checkpoint.tensor_degrees == {1, 2, 4}
    with pytest.raises(ValueError, match=r"^Set tensor_parallel_degree to one of 1, 2, .*: 3 cuts"):
        checkpoint.check_degrees(Degrees(tensor=3))
    checkpoint.check_degrees(Degrees(tensor=4))
