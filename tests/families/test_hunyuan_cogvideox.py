"""HunyuanVideo and CogVideoX beyond what all families are tested for: other files' names, text of less tokens than ranks,
and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from testing import tiny
from testing.cases import cogvideox, hunyuan_video

pytestmark = pytest.mark.threads

HUNYUAN, COGVIDEOX = hunyuan_video.CASES[0], cogvideox.CASES[0]


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory):
    """(diffusers' model, its single file)."""
    model = HUNYUAN.model()
    return model, HUNYUAN.save(model, tmp_path_factory.mktemp("hunyuan") / "hunyuan.safetensors")


@pytest.mark.parametrize("prefix", ["", "model.model."])
def test_tencents_files_give_the_same_weights(hunyuan, tmp_path, prefix):
    model, file = hunyuan
    names = hunyuan_video.tencent_names(load_file(file))
    assert "double_blocks.0.img_attn_q_norm.weight" in names
    assert "txt_in.individual_token_refiner.blocks.1.mlp.fc1.bias" in names
    assert "time_in.mlp.0.weight" in names
    path = tmp_path / "tencent.safetensors"
    save_file({prefix + key: value for key, value in names.items()}, path)
    assert open_checkpoint(path).config == open_checkpoint(file).config
    expected, state = model.state_dict(), tiny.whole_model(path).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_files_that_comfyui_saved_give_the_same_weights(hunyuan, tmp_path):
    model, file = hunyuan
    path = tmp_path / "saved.safetensors"
    save_file({key.replace("_norm.scale", "_norm.weight"): value for key, value in load_file(file).items()}, path)
    state = tiny.whole_model(path).state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("degrees", [Degrees(ulysses=2), Degrees(ring=2)], ids=str)
def test_a_rank_without_text_computes_its_picture(hunyuan, pools, degrees):
    model, file = hunyuan
    x, timestep, tensors = HUNYUAN.inputs()
    one = tensors | {"context": tensors["context"][:, :1]}
    found = pools.load(file, degrees).predict(ModelCall(x, timestep, one), lambda: None)
    with torch.inference_mode():
        expected, other = (HUNYUAN.reference(model, x, timestep, given) for given in (one, tensors))
    assert tiny.relative(found, expected) <= 1e-5
    assert tiny.relative(found, other) > 1e-4


def refused(file, tmp_path, changes):
    """What opening the file with other tensors says."""
    path = tmp_path / "other.safetensors"
    save_file(load_file(file) | changes, path)
    with pytest.raises(ValueError) as error:
        open_checkpoint(path)
    return str(error.value)


def test_other_patches_are_refused(hunyuan, tmp_path):
    said = refused(hunyuan[1], tmp_path, {"img_in.proj.weight": torch.zeros(48, 6, 1, 1, 1)})
    assert said.startswith("model_name: ")
    assert "patches of [1, 1, 1]" in said


def test_token_replace_is_refused(tmp_path):
    HUNYUAN.model(HUNYUAN.config | {"image_condition_type": "token_replace"}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_name: .*token_replace"):
        open_checkpoint(tmp_path)


def test_hunyuan_video_masks_what_the_mask_hides_alone():
    tensors = {"context": torch.zeros(1, 3, 24), "y": torch.zeros(1, 12), "guidance": torch.ones(1)}
    conditioning = HUNYUAN.row.inputs.conditioning
    assert "text_mask" not in conditioning(HUNYUAN.config, tensors | {"attention_mask": torch.ones(1, 3)})
    found = conditioning(HUNYUAN.config, tensors | {"attention_mask": torch.tensor([[1, 1, 0]])})
    assert found["text_mask"].tolist() == [[True, True, False]]
    with pytest.raises(ValueError, match="positive, negative: guidance"):
        conditioning(HUNYUAN.config, tensors | {"guidance": None})


def test_a_table_of_positions_is_refused(tmp_path):
    file = COGVIDEOX.save(COGVIDEOX.model(), tmp_path / "cogvideox.safetensors")
    said = refused(file, tmp_path, {"patch_embed.pos_embedding": torch.zeros(1, 4, 48)})
    assert said.startswith("model_name: ")
    assert "table of positions" in said


def test_2b_needs_its_number_of_text_tokens():
    case = cogvideox.CASES[1]
    given = {"context": torch.zeros(1, 77, case.config["text_embed_dim"])}
    assert case.row.inputs.conditioning(COGVIDEOX.config, given).keys() == {"context"}
    with pytest.raises(ValueError, match="positive, negative: the prompt has 77 tokens, this model needs 226"):
        case.row.inputs.conditioning(case.config, given)
