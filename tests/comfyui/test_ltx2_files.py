"""LTX-2's files as people have them: all in one and scaled fp8, as 2.3 is, and int8 with ConvRot, as 2.5 is.

Weights of the connectors, which ComfyUI's process reads, are quantised too.
"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from testing.quantised import quantise_blocks

pytestmark = pytest.mark.comfyui

PREFIX = "model.diffusion_model."
NOTE = ".comfy_quant"
NAMES = {"all in one": "ltx-2.3", "int8": "ltx-2.5"}
"""What the files are of. The sound of 2.5 is wider: halves of the columns then hold a whole group of rotated values."""
MODES = ("one rank", "pipe 2", "ulysses 2", "tensor 2")
QUICK = {("all in one", "pipe 2"), ("int8", "tensor 2")}
"""What the default tier has of the table."""
OTHER_KEYS = ("audio_vae.decoder.conv_in.conv.weight", "vocoder.conv_pre.weight", "text_embedding_projection.weight")
"""Of what else is in the file: ComfyUI's nodes of their own read it."""
RATIO = 0.9, 1.05
"""Ranks round as ComfyUI does (test_quantised.py). The connectors' inputs are not rounded here (docs/models.md)."""
FROM_NATIVE = 1.2
"""As between modes in test_quantised_ranks.py: three steps under two guidances."""


def read(base, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and header of the small plain file."""
    path = base / "models" / "diffusion_models" / f"{NAMES[kind]}.safetensors"
    with safe_open(path, framework="pt") as file:
        return load_file(path), file.metadata()


def save_all_in_one(base) -> None:
    """As Lightricks' fp8 files: the layers' formats in the header, a scale of the weight and of the input for each."""
    state, metadata = read(base, "all in one")
    state = {PREFIX + key: value for key, value in quantise_blocks(state, "fp8")[0].items()}
    layers = [key.removesuffix(NOTE) for key in state if key.endswith(NOTE)]
    assert any("connector" in layer for layer in layers)
    for layer in layers:
        del state[layer + NOTE]
        state[f"{layer}.input_scale"] = torch.full((), 0.5)
    state |= {key: torch.ones(4, 4) for key in OTHER_KEYS}
    noted = {"_quantization_metadata": json.dumps({"layers": {layer: {"format": "float8_e4m3fn"} for layer in layers}})}
    folder = base / "models" / "checkpoints"
    folder.mkdir(exist_ok=True)
    save_file(state, folder / f"{NAMES['all in one']}.safetensors", metadata | noted)


def save_int8(base) -> None:
    state, metadata = read(base, "int8")
    state, _ = quantise_blocks(state, "int8, rotated")
    assert any("connector" in key and key.endswith(NOTE) for key in state)
    save_file(state, base / "models" / "diffusion_models" / f"{NAMES['int8']}-int8.safetensors", metadata)


@pytest.fixture(scope="module")
def found(request, inside, base):
    """Results by "kind, native" and "kind, mode", of one run of ComfyUI for what was selected."""
    calls = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = {kind: [call["mode"] for call in calls if call["kind"] == kind] for kind in NAMES}
    saves = {"all in one": save_all_in_one, "int8": save_int8}
    for kind in (kind for kind in NAMES if wanted[kind]):
        inside.run("small_files", names=[NAMES[kind]])
        saves[kind](base)
    return inside.run("ltx2_files", wanted=wanted, names=NAMES)[0]


def table(kind: str):
    marks = {mode: () if (kind, mode) in QUICK else pytest.mark.full for mode in MODES}
    return pytest.mark.parametrize(
        ("kind", "mode"), [pytest.param(kind, mode, marks=marks[mode], id=f"{kind}, {mode}") for mode in MODES]
    )


@table("all in one")
def test_an_all_in_one_file_in_fp8_is_load_checkpoints(found, measured, kind, mode):
    theirs, ours = found[f"{kind}, native"], found[f"{kind}, {mode}"]
    assert "error" not in theirs and "error" not in ours, (theirs, ours)
    assert 0.1 < theirs["largest"] < 1000
    measured("LTX-2.3 all in one in fp8, largest difference", ours["difference"])
    assert ours["difference"] <= 5e-5
    assert theirs["clip"] and ours["clip"]  # there is no text encoder in it: a None, and no refusal
    assert ours["picture"] == 0.0 and ours["spread"] > 0.05


@table("int8")
def test_int8_is_as_far_from_the_plain_model_as_comfyuis_own(found, measured, kind, mode):
    theirs, ours = found[f"{kind}, native"], found[f"{kind}, {mode}"]
    assert "error" not in theirs and "error" not in ours, (theirs, ours)
    measured("LTX-2.5 in int8, native: distance from the plain model's", theirs["from plain"])
    ratio = ours["from plain"] / theirs["from plain"]
    measured(f"LTX-2.5 in int8, {mode}: distance from the plain model's, over native's", ratio)
    measured(f"LTX-2.5 in int8, {mode}: distance from native's", ours["from native"])
    assert RATIO[0] <= ratio <= RATIO[1]
    assert ours["from native"] < FROM_NATIVE * theirs["from plain"]
