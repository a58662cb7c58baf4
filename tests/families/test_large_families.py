"""HunyuanVideo 1.5, Kandinsky 5, Ideogram 4 and HiDream beyond what all families are tested for: what is refused, and
what follows from a model's width."""

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.families import FAMILIES, kandinsky5
from parallel_backend.families.base.step_inputs import TEXT_MASK
from testing.cases import hidream, hunyuan_video15, ideogram4
from testing.cases import kandinsky5 as kandinsky5_cases

pytestmark = pytest.mark.threads

WIDTH = 24


def conditioning(family, config, **given):
    return FAMILIES[family].inputs.conditioning(config, {"latent": (2, 3, 8, 6), **given})


@pytest.mark.parametrize("case", hunyuan_video15.CASES, ids=lambda case: case.name)
def test_text_with_masked_tokens_and_other_encoders_are_refused(case):
    given = {"context": torch.zeros(1, 3, WIDTH), "attention_mask": torch.ones(1, 3), "guidance": torch.ones(1)}
    embeds = {"guidance"} if case.config.get("guidance_embeds") else set()
    assert conditioning(case.family, case.config, **given).keys() == {"context"} | embeds
    with pytest.raises(ValueError, match="positive, negative: the conditioning masks some of its tokens"):
        conditioning(case.family, case.config, **given | {"attention_mask": torch.tensor([[1, 1, 0]])})
    quoted = given | {"txt_byt5": torch.zeros(1, 2, 21)}
    if case.config["text_embed_2_dim"] is None:  # as ComfyUI's own, it takes no notice of quoted words
        assert "glyphs" not in conditioning(case.family, case.config, **quoted)
        return
    with pytest.raises(ValueError, match="positive, negative: the conditioning's ByT5 text has width 21"):
        conditioning(case.family, case.config, **quoted)


def test_hunyuan_video_15_takes_its_own_vision_model_alone():
    given = {"context": torch.zeros(1, 3, WIDTH), "clip_fea": torch.zeros(1, 2, 29)}
    with pytest.raises(ValueError, match="positive, negative: the CLIP vision output has width 29, this model needs 28"):
        conditioning("hunyuan-video-1.5", hunyuan_video15.VIDEO, **given)


def test_ideogram_runs_without_text_and_masks_what_is_hidden():
    config = ideogram4.CONFIG
    assert conditioning("ideogram-4", config)["context"].shape == (2, 0, config["llm_features_dim"])
    text = torch.zeros(1, 3, config["llm_features_dim"])
    assert TEXT_MASK not in conditioning("ideogram-4", config, context=text, attention_mask=torch.ones(1, 3))
    masked = conditioning("ideogram-4", config, context=text, attention_mask=torch.tensor([[1, 1, 0]]))
    assert masked[TEXT_MASK].tolist() == [[True, True, False]]


@pytest.mark.parametrize("llama", [None, torch.zeros(1, 4, 6, 20), torch.zeros(1, 5, 6, 21)], ids=str)
def test_hidream_needs_the_layers_of_llama(llama):
    given = {"context": torch.zeros(1, 3, 20), "y": torch.zeros(1, 12)}
    whole = conditioning("hidream-i1", hidream.CONFIG, **given, encoder_hidden_states_llama3=torch.zeros(1, 5, 6, 20))
    assert whole["context"].shape[1] == 3 + 6 + 6
    with pytest.raises(ValueError, match="positive, negative: HiDream needs Llama's text"):
        conditioning("hidream-i1", hidream.CONFIG, **given, encoder_hidden_states_llama3=llama)


@pytest.mark.parametrize(("width", "side", "distance"), [(4096, 58, 1 / 2), (4096, 60, 1 / 3.16), (1792, 60, 1 / 2)])
def test_positions_of_a_large_video_lie_closer_together_in_the_pro_model(width, side, distance):
    step = SimpleNamespace(grid=(2, side, side), positions=lambda: torch.tensor([[1.0, 2.0, 3.0]]), tensors={})
    found = kandinsky5._positions(step, kandinsky5_cases.VIDEO | {"model_dim": width})
    assert torch.allclose(found, torch.tensor([[1.0, 2 * distance, 3 * distance]]))


def test_first_pictures_of_another_size_than_the_videos_are_refused(pools, tmp_path):
    case = next(case for case in kandinsky5_cases.CASES if case.name == "kandinsky-5-video")
    path = case.save(case.model(), tmp_path / "kandinsky.safetensors")
    x, timestep, tensors = case.inputs()
    tensors["start"] = tensors["start"][..., :-2]
    with pytest.raises(ValueError, match="positive, negative: the first pictures' latent has another size"):
        pools.load(path, Degrees()).predict(ModelCall(x, timestep, tensors), lambda: None)
