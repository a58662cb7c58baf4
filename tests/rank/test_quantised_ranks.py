"""Models in ComfyUI's quantised formats on ranks: as far from the plain model as on one, however they are cut.

Where inputs are rounded, a difference of rounding before it may become one of a whole step behind it, so outputs are
compared by their distance from those of the plain model; test_quantised_formats.py has single layers, bit by bit.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.rank.loaded_stage import LoadedStage
from parallel_backend.rank.stage.joint_products import JointProduct
from parallel_backend.rank.stage.linear import PackedLinear
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from testing import tiny
from testing.cases import all_cases
from testing.quantised import quantise_blocks
from tests.rank.test_lora import lora, merged_file
from tests.support.alone import nobody

pytestmark = pytest.mark.threads

RATIO = 0.05
"""Of distances from the plain model: one rank's and a mode's."""
EXACT = 1e-5
MODES = (Degrees(pipe=2), Degrees(ulysses=2), Degrees(tensor=2))
KINDS = ("int8, rotated", "nvfp4", "mxfp8", "w4a4", "w4a8", "w4a16", "fp8")
ROUNDED = ("int8, rotated", "w4a4", "w4a8")
"""Multiplied in this format on a CPU too."""


FULL_PRECISION = torch.tensor(list(b'{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}'), dtype=torch.uint8)
"""A layer's mark in a file."""
IN_BOTH = ("int8, rotated", "nvfp4")
"""One whose inputs are rounded, one that is expanded: tried in both families outside of the full tier too."""


def case_of(name: str, **config):
    """Of a size that formats with groups of 64 can hold, cut in two."""
    case = next(case for case in all_cases() if case.name == name)
    return replace(case, config=case.native.config | config)


def flux_tensors(generator, batch):
    tensors = {"context": torch.randn(batch, 7, 64, generator=generator), "guidance": torch.full((batch,), 3.5)}
    return tensors | {"pooled": torch.randn(batch, 32, generator=generator)}


def large_gates(model):
    """So that what the blocks add, which is quantised, shows beside their inputs."""
    model.modulation[1].weight.data *= 20


CASES = {
    "flux": replace(case_of("flux-dev", num_single_layers=2), tensors=flux_tensors),
    "wan": case_of("wan-2.1-t2v", ffn_dim=256, num_layers=2),
    "qwen-image-2.1, fused feed-forward": replace(
        case_of("qwen-image-2.1", fused_mlp=True), latent=(64, 12, 8), adjust=large_gates
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(family)`: (diffusers' model, its file, what it gives)."""
    folder, known = tmp_path_factory.mktemp("quantised"), {}

    def make(family: str):
        if family not in known:
            case = CASES[family]
            model = case.model()
            with torch.inference_mode():
                known[family] = (
                    model,
                    case.save(model, folder / f"{family}.safetensors"),
                    case.reference(model, *case.inputs()),
                )
        return known[family]

    return make


@pytest.fixture(scope="module")
def files(made, tmp_path_factory):
    """`files(family, kind)`: (the quantised file, the file of its values)."""
    folder, known = tmp_path_factory.mktemp("files"), {}

    def make(family: str, kind: str):
        if (family, kind) not in known:
            paths = folder / f"{len(known)}.safetensors", folder / f"{len(known)}-values.safetensors"
            for tensors, path in zip(quantise_blocks(load_file(made(family)[1]), kind), paths, strict=True):
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
            known[family, kind] = paths
        return known[family, kind]

    return make


def predict(pools, path, degrees, case, dtype="fp32"):
    return pools.load(path, degrees, dtype).predict(ModelCall(*case.inputs()), lambda: None)


def in_tiers(family: str, kind: str) -> list[pytest.MarkDecorator]:
    """Marks of a row: the quick tier has one that is rounded and one that is expanded, of the first family."""
    quick, default = family == "flux" and kind in IN_BOTH, family == "flux" or kind in IN_BOTH
    return [] if quick else [pytest.mark.slow] if default else [pytest.mark.full]


@pytest.mark.parametrize(
    ("family", "kind"),
    [pytest.param(family, kind, marks=in_tiers(family, kind)) for family in CASES for kind in KINDS],
)
def test_every_mode_is_as_far_from_the_plain_model_as_one_rank(pools, made, files, measured, family, kind):
    case, (quantised, values) = CASES[family], files(family, kind)
    plain = made(family)[2]
    alone, expanded = (predict(pools, path, Degrees(), case) for path in (quantised, values))
    distance = tiny.relative(alone, plain)
    measured(f"{family}, {kind}: distance from the plain model", distance)
    assert 1e-3 < distance < 0.5
    if kind in ROUNDED:
        assert tiny.relative(alone, expanded) > 1e-3  # inputs are rounded too
    else:
        assert tiny.relative(alone, expanded) < EXACT
    for degrees in MODES:
        found = predict(pools, quantised, degrees, case)
        measured(f"{family}, {kind}, {degrees}: distance over one rank's", tiny.relative(found, plain) / distance)
        if kind in ROUNDED:
            assert tiny.relative(found, plain) == pytest.approx(distance, rel=RATIO)
            assert tiny.relative(found, alone) < 1.2 * distance
        else:
            assert tiny.relative(found, alone) < EXACT


@pytest.mark.parametrize("family", CASES)
def test_a_part_of_a_file_on_each_rank(pools, files, family):
    """Weights over all ranks are as large as the file, but for what every rank has: embeddings of time, norms, biases."""
    case = CASES[family]
    for kind in ("int8, rotated", "nvfp4"):
        path, _ = files(family, kind)
        size, whole = path.stat().st_size, pools.load(path, Degrees()).weight_bytes[0]
        assert whole < 1.02 * size
        checkpoint = open_checkpoint(path)
        blocks = case.row.blocks.counts(case.config)
        in_blocks = sum(checkpoint.nbytes(key, "fp32") for key in checkpoint.key_map if key.partition(".")[0] in blocks)
        # Scales of rows are on both ranks where columns are cut, which shows with so few of them.
        for degrees, limit in ((Degrees(pipe=2), 1.001), (Degrees(tensor=2), 1.05)):
            held = pools.load(path, degrees).weight_bytes
            assert in_blocks < sum(held) < limit * in_blocks + 2 * (whole - in_blocks)


@pytest.mark.parametrize("family", ["flux", pytest.param("wan", marks=pytest.mark.full)])
def test_weight_dtype_int8_is_as_close_as_a_file_in_int8(pools, made, files, measured, family):
    case, (_, path, plain) = CASES[family], made(family)
    theirs = tiny.relative(predict(pools, files(family, "int8, rotated")[0], Degrees(), case), plain)
    for degrees in (Degrees(), *MODES):
        ours = tiny.relative(predict(pools, path, degrees, case, "int8"), plain)
        measured(f"{family}, weight_dtype int8, {degrees}: distance over that of an int8 file", ours / theirs)
        assert ours == pytest.approx(theirs, rel=0.25)
    fp8 = tiny.relative(predict(pools, path, Degrees(), case, "fp8_e4m3fn"), plain)
    measured(f"{family}, weight_dtype fp8_e4m3fn: distance over int8's", fp8 / ours)
    assert fp8 > 2 * ours  # though inputs stay as they are in fp8 on a CPU
    weights = sum(value.numel() for key, value in load_file(path).items() if "blocks." in key)
    others = path.stat().st_size - 4 * weights
    assert pools.load(path, Degrees(), "int8").weight_bytes[0] < 1.1 * weights + others


@pytest.mark.parametrize("degrees", [Degrees(), *MODES], ids=str)
@pytest.mark.parametrize("kind", ("int8, rotated", "w4a4"))
def test_layers_of_one_layer_of_the_file_are_one_product(thread_pools, files, monkeypatch, kind, degrees):
    """With the bits of each layer's own product. Flux's two-stream blocks have two such layers each, its others one."""
    case, (path, _) = CASES["flux"], files("flux", kind)
    build, built = JointProduct._build, []

    def counted(product: JointProduct):
        built.append((weight := build(product)) is not None)
        return weight

    def outputs():
        return thread_pools.load(path, degrees, fresh=True).predict(ModelCall(*case.inputs()), lambda: None)

    monkeypatch.setattr(JointProduct, "_build", counted)
    together = outputs()
    blocks = 2 * case.config["num_layers"] + case.config["num_single_layers"]
    assert built == [True] * blocks * (degrees.world if degrees.pipe == 1 else 1)
    monkeypatch.setattr(JointProduct, "_build", lambda _product: None)
    assert torch.equal(outputs(), together)


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tensor=2)], ids=str)
def test_a_lora_is_added_beside_the_product(pools, files, measured, tmp_path, degrees):
    """It moves the output as it does when it is merged into the expanded weights, but for the rounding of inputs."""
    case, (path, values) = CASES["flux"], files("flux", "int8, rotated")
    plain, deltas = predict(pools, values, degrees, case), lora(load_file(values))
    model = pools.load(path, degrees)
    before = model.predict(ModelCall(*case.inputs()), lambda: None)
    model.adapt("a LoRA", deltas, lambda: None)
    found = model.predict(ModelCall(*case.inputs()), lambda: None)
    with torch.inference_mode():
        expected = case.reference(tiny.published_model(merged_file(values, deltas, tmp_path)), *case.inputs())
    measured("a LoRA beside int8 products: distance from the merged one", tiny.relative(found, expected))
    assert tiny.relative(found, expected) < 0.02 * tiny.relative(plain, expected)
    model.adapt(None, (), lambda: None)
    assert torch.equal(model.predict(ModelCall(*case.inputs()), lambda: None), before)


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tensor=2)], ids=str)
def test_the_halves_of_a_packed_layer_change_places(pools, measured, tmp_path, degrees):
    """The files of MiniMax H3, which people use in int8, have a feed-forward's gate first, its class has it last."""
    case = next(case for case in all_cases() if case.name == "minimax-h3")
    config = case.config | {"hidden_size": 128, "attention_head_dim": 32, "ffn_dim": 128}
    whole = case.save(case.model(config), tmp_path / "whole.safetensors", config)
    quantised, values = quantise_blocks(load_file(whole), "int8, rotated")
    assert "blocks.0.mlp.fc1.comfy_quant" in quantised
    found = []
    for name, tensors in (("quantised", quantised), ("values", values)):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path := tmp_path / f"{name}.safetensors")
        found.append(predict(pools, path, degrees, case))
    measured("minimax-h3 in int8: distance from the file's values", tiny.relative(*found))
    assert 1e-4 < tiny.relative(*found) < 0.05


@pytest.mark.parametrize("fp8_products", [False, True])
def test_plain_fp8_multiplies_in_fp8_only_if_comfyui_does(made, tmp_path, fp8_products):
    """Those layers only: one that has a scale says by itself how it multiplies."""
    _, plain, _ = made("flux")
    scaled = "double_blocks.0.img_attn.qkv"
    tensors = load_file(plain)
    tensors |= {k: t.to(torch.float8_e4m3fn) for k, t in tensors.items() if "blocks." in k and t.ndim == 2}
    tensors |= {f"{scaled}.weight_scale": torch.ones(()), f"{scaled}.comfy_quant": FULL_PRECISION}
    save_file(tensors, path := tmp_path / "fp8.safetensors")
    setup = Setup(path, "fp8_e4m3fn", ("cpu",), Degrees(), "auto", fp8_products=fp8_products)
    blocks = (Span(0, open_checkpoint(path).family.blocks.total(open_checkpoint(path).config)),)
    load = m.Load(setup, blocks, (1.0,))
    stage = LoadedStage(0, torch.device("cpu"), load, lambda fraction: None, nobody(), Heartbeat())
    layers = [layer for layer in stage.model.modules() if isinstance(layer, PackedLinear)]
    full = [layer.packing.full_precision for layer in layers if layer.packing.scale is None]
    assert len(full) > 5 and full == [not fp8_products] * len(full)
    assert all(layer.packing.full_precision for layer in layers if layer.packing.scale is not None)
