"""Files that ask for a kind of attention in some of their layers (ComfyUI 0.37 and newer)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.tensor_files import MAX_JSON_BYTES
from testing import mini

LAYER = "double_blocks.0.img_attn"
INT8, SOL = {"attention": "comfy_kitchen_int8"}, {"attention": "comfy_kitchen_sol", "tau": 1.3}


def said(value) -> torch.Tensor:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.tensor(list(text), dtype=torch.uint8)


def save(mini_file, folder, preferences: dict[str, torch.Tensor], prefix: str = ""):
    """`mini_file`'s weights with a preference for each layer."""
    state = load_file(mini_file) | {f"{layer}.comfy_attention.config": value for layer, value in preferences.items()}
    path = folder / "asking.safetensors"
    save_file({prefix + key: value for key, value in state.items()}, path)
    return path


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("wish", [INT8, [SOL, INT8], [{"attention": "of next year"}, INT8]])
def test_a_layers_wish_is_known_and_is_no_weight(mini_file, tmp_path, prefix, wish):
    plain = mini.opened(mini_file)
    asking = mini.opened(save(mini_file, tmp_path, {LAYER: said(wish)}, prefix))
    assert asking.attention == {LAYER: "comfy_kitchen"}
    assert asking.entries.keys() == plain.entries.keys()
    assert not plain.attention


@pytest.mark.parametrize("wish", [SOL, [], {"attention": ["comfy_kitchen_int8"]}])
def test_a_wish_for_what_is_not_known_is_left_out(mini_file, tmp_path, wish):
    assert not mini.opened(save(mini_file, tmp_path, {LAYER: said(wish)})).attention


@pytest.mark.parametrize(
    "wish",
    [
        said("comfy_kitchen_int8"),
        said(b"{"),
        torch.zeros(3),
        torch.zeros(MAX_JSON_BYTES + 1, dtype=torch.uint8),
    ],
)
def test_a_wish_that_cannot_be_read_is_refused_by_the_files_name(mini_file, tmp_path, wish):
    with pytest.raises(ValueError, match=r"^model_name: .*asking\.safetensors"):
        mini.opened(save(mini_file, tmp_path, {LAYER: wish}))
