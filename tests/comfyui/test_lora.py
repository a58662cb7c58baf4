"""LoRA and merges by ComfyUI's own nodes: the parallel MODEL gives what ComfyUI's own model gives with the same files."""

import pytest

from .conftest import asked, mostly_full

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
LIKE_NATIVE = (
    *("kohya", "original", "tensor_parallel_degree 2", "two on one another"),
    *("differences", "LoKr", "SD3, kohya", "SD3, LoCon with a third factor"),
    *("left out", "enlarging", "enlarging, tensor"),
    *("a hook for each", "keyframes", "hook of a region", "hooks beside a LoRA"),
    *("hooks under PipeFusion", "bypass of LoRA", "bypass of LoKr", "bypass of DoRA"),
    *("merge with LoRAs", "subtracted and added", "DoRA", "set", "factors", "merge over tensor_parallel_degree 2"),
)
IN_DEFAULT = (
    *("kohya", "tensor_parallel_degree 2", "differences", "LoKr", "SD3, LoCon with a third factor", "left out"),
    *("enlarging", "a hook for each", "hooks under PipeFusion", "bypass of LoRA", "merge with LoRAs"),
)
REMOVED = ("removed", "enlarging and not", "hooks gone", "bypass gone", "ranks started again", "after all")
SAID = {
    "refusal none fits": "this LoRA is for another model: its only layer does not fit (double_blocks.0.img_attn.proj.weight "
    "is [256, 256], the tensors for it are [256, 4], [4, 128])",
    "refusal enlarging": "a LoRA that enlarges double_blocks.0.img_attn.proj.weight to [256, 512] cannot run on ranks: "
    "ComfyUI has no class Flux of that size",
    "refusal factors of a LoKr": "ComfyUI cannot compute with the LOKR for double_blocks.0.img_attn.proj.weight (",
    "refusal making smaller": "(it makes [256, 128] of the weight)",
    "refusal of OFT in bypass mode": "OFT in bypass mode",
    "refusal of enlarging in a hook": "LORA that enlarges the weight in a conditioning (a hook)",
    "refusal of DoRA in a hook": "LORA in a conditioning (a hook)",
    "refusal of saving": "Load the model with ComfyUI's own loader",
    "refusal of merging": "Load the model with ComfyUI's own loader",
}


@pytest.fixture(scope="module")
def found(request, inside):
    return inside.run("lora", skip={*LIKE_NATIVE} - {*IN_DEFAULT} - asked(request, "case"))[0]


@pytest.mark.parametrize("case", mostly_full(LIKE_NATIVE, IN_DEFAULT))
def test_equals_the_native_model_with_the_same_file(found, case):
    got = found[case]
    assert got["difference"] <= LIMIT
    assert got["moved"] > 0.05


@pytest.mark.parametrize("case", REMOVED)
def test_nothing_is_left_of_what_was_removed(found, case):
    assert found[case].get("difference") == 0.0, found[case]


@pytest.mark.parametrize("model", ["Flux", "SD3"])
@pytest.mark.parametrize("what", ["names and shapes", "LoRA names"])
def test_weights_have_the_names_that_the_native_model_gives_them(found, model, what):
    got = found[f"{model}, {what}"]
    assert got.get("same"), got
    assert got["count"] > 50


def test_layers_of_another_size_are_said(found):
    got = found["left out"]
    assert got["kinds"] == 4
    assert "Parallel DiT: 4 of " in got["told"][0]
    assert "layers of this LoRA do not fit this model and are left out" in got["told"][0]


@pytest.mark.parametrize("case", SAID)
def test_what_the_ranks_cannot_add_is_refused_by_name(found, case):
    error = found.error(case)
    assert error.startswith("ValueError: model: ")
    assert SAID[case] in error


@pytest.mark.parametrize("save", ["save_model", "save_lora"])
def test_saved_files_are_those_of_the_native_model(found, save):
    assert found[save].get("keys") == found[save].get("same") > 10, found[save]
