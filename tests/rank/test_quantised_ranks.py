"""Models in ComfyUI's quantised formats on ranks: as far from the plain model as on one, however they are cut.

Where inputs are rounded, a difference of rounding before it may become one of a whole step behind it, so outputs are
compared by their distance from those of the plain model; test_quantised_formats.py has single layers, bit by bit.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.stage.linear import PackedLinear
from testing import mini
from testing.quantised import quantise_blocks
from tests.rank.test_lora import lora, merged_file
from tests.support.one_rank import OneRank

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
QUICK = ("int8, rotated", "nvfp4")
"""One whose inputs are rounded, one that is expanded."""


CONFIG = mini.CONFIG | {"context_width": 64, "pooled_width": 64, "single_blocks": 2}
"""Of sides that formats with groups of 64 can hold, cut in two."""
INPUTS = mini.inputs(CONFIG)


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory):
    return mini.save(mini.random_model(CONFIG), tmp_path_factory.mktemp("plain") / "plain.safetensors")


@pytest.fixture(scope="module")
def plain(plain_file):
    """What the plain model gives."""
    return mini.reference(mini.load(plain_file), *INPUTS)


@pytest.fixture(scope="module")
def files(plain_file, tmp_path_factory):
    """`files(kind)`: (the quantised file, the file of its values)."""
    folder, known = tmp_path_factory.mktemp("files"), {}

    def make(kind: str):
        if kind not in known:
            paths = folder / f"{len(known)}.safetensors", folder / f"{len(known)}-values.safetensors"
            for tensors, path in zip(quantise_blocks(load_file(plain_file), kind), paths, strict=True):
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
            known[kind] = paths
        return known[kind]

    return make


def predict(pools, path, degrees, dtype="fp32"):
    return pools.mini(path, degrees, dtype).predict(ModelCall(*INPUTS), lambda: None)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS])
def test_every_mode_is_as_far_from_the_plain_model_as_one_rank(pools, plain, files, kind):
    quantised, values = files(kind)
    alone, expanded = (predict(pools, path, Degrees()) for path in (quantised, values))
    distance = mini.relative(alone, plain)
    assert 1e-3 < distance < 0.5
    if kind in ROUNDED:
        assert mini.relative(alone, expanded) > 1e-3  # inputs are rounded too
    else:
        assert mini.relative(alone, expanded) < EXACT
    for degrees in MODES:
        found = predict(pools, quantised, degrees)
        if kind in ROUNDED:
            assert mini.relative(found, plain) == pytest.approx(distance, rel=RATIO)
            assert mini.relative(found, alone) < 1.2 * distance
        else:
            assert mini.relative(found, alone) < EXACT


def test_weight_dtype_int8_is_as_close_as_a_file_in_int8(pools, plain, plain_file, files):
    theirs = mini.relative(predict(pools, files("int8, rotated")[0], Degrees()), plain)
    for degrees in (Degrees(), *MODES):
        ours = mini.relative(predict(pools, plain_file, degrees, "int8"), plain)
        assert ours == pytest.approx(theirs, rel=0.25)
    fp8 = mini.relative(predict(pools, plain_file, Degrees(), "fp8_e4m3fn"), plain)
    assert fp8 > 2 * ours  # though inputs stay as they are in fp8 on a CPU
    weights = sum(value.numel() for key, value in load_file(plain_file).items() if "blocks." in key)
    others = plain_file.stat().st_size - 4 * weights
    assert pools.mini(plain_file, Degrees(), "int8").weight_bytes[0] < 1.1 * weights + others


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tensor=2)], ids=str)
def test_a_lora_is_added_beside_the_product(pools, files, tmp_path, degrees):
    """It moves the output as it does when it is merged into the expanded weights, but for the rounding of inputs."""
    path, values = files("int8, rotated")
    plain, deltas = predict(pools, values, degrees), lora(load_file(values))
    model = pools.mini(path, degrees)
    before = model.predict(ModelCall(*INPUTS), lambda: None)
    model.adapt("a LoRA", deltas, lambda: None)
    found = model.predict(ModelCall(*INPUTS), lambda: None)
    expected = mini.reference(mini.load(merged_file(values, deltas, tmp_path)), *INPUTS)
    assert mini.relative(found, expected) < 0.02 * mini.relative(plain, expected)
    model.adapt(None, (), lambda: None)
    assert torch.equal(model.predict(ModelCall(*INPUTS), lambda: None), before)


@pytest.mark.parametrize("fp8_products", [False, True])
def test_plain_fp8_multiplies_in_fp8_only_if_comfyui_does(plain_file, tmp_path, fp8_products):
    """Those layers only: one that has a scale says by itself how it multiplies."""
    scaled = "double_blocks.0.img_attn.qkv"
    tensors = load_file(plain_file)
    tensors |= {k: t.to(torch.float8_e4m3fn) for k, t in tensors.items() if "blocks." in k and t.ndim == 2}
    tensors |= {f"{scaled}.weight_scale": torch.ones(()), f"{scaled}.comfy_quant": FULL_PRECISION}
    save_file(tensors, path := tmp_path / "fp8.safetensors")
    rank = OneRank(path, "fp8_e4m3fn", fp8_products=fp8_products)
    layers = [layer for layer in rank.stage.model.modules() if isinstance(layer, PackedLinear)]
    full = [layer.packing.full_precision for layer in layers if layer.packing.scale is None]
    assert len(full) > 5 and full == [not fp8_products] * len(full)
    assert all(layer.packing.full_precision for layer in layers if layer.packing.scale is not None)
