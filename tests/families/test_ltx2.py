"""What is peculiar to LTX-2's files: its header, and its connectors, which ComfyUI's process runs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.checkpoints.reader import text_values
from testing.cases import ltx2

(CASE,) = (case for case in ltx2.CASES if case.name == "ltx-2.3")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ltx2") / "ltx2.safetensors"
    return CASE.save(CASE.model(), path, CASE.config)


def with_header(file, path, **said):
    config = json.loads(ltx2.metadata(CASE.model().config)["config"])["transformer"]
    config = {entry: value for entry, value in (config | said).items() if value is not None}
    save_file(load_file(file), path, {"config": json.dumps({"transformer": config})})
    return path


@pytest.mark.parametrize("entry", ["rope_type", "causal_temporal_positioning", "use_middle_indices_grid"])
def test_a_file_whose_header_was_lost_is_refused(file, tmp_path, entry):
    with pytest.raises(
        ValueError, match=f"^model_name: bare.safetensors: the header of this LTX-2 file does not say its {entry}"
    ):
        open_checkpoint(with_header(file, tmp_path / "bare.safetensors", **{entry: None}))


@pytest.mark.parametrize(
    ("entry", "value"), [("causal_temporal_positioning", False), ("av_ca_timestep_scale_multiplier", 500.0)]
)
def test_a_header_that_asks_for_another_model_is_refused(file, tmp_path, entry, value):
    with pytest.raises(ValueError, match=f"^model_name: other.safetensors says in its header that its {entry} is"):
        open_checkpoint(with_header(file, tmp_path / "other.safetensors", **{entry: value}))


def test_the_connectors_are_no_weights_of_the_ranks(file):
    checkpoint = open_checkpoint(file)
    assert not any("connector" in source.key for source in checkpoint.key_map.values())
    assert set(checkpoint.text_keys("")) < checkpoint.original_shapes.keys()
    registers = text_values(checkpoint, "audio_embeddings_connector.learnable_registers", torch.float32, torch.device("cpu"))
    assert torch.equal(registers[""], load_file(file)["audio_embeddings_connector.learnable_registers"])


def test_text_without_connectors_to_go_through_is_refused():
    config = {"connector_num_attention_heads": 32, "audio_connector_num_attention_heads": None}
    with pytest.raises(ValueError, match=r"^model_name: this LTX-2 model comes without its connectors"):
        CASE.row.text_model.run(dict(CASE.model().config) | config, lambda _prefix: {}, torch.zeros(1, 7, 192), True)


def test_guides_that_do_not_fit_the_latent_are_refused():
    config, grid = dict(CASE.model().config), (6, 4, 3)
    given = {"context": torch.zeros(1, 7, 192), "grid": grid} | ltx2.guides(*grid[1:]) | {"denoise_mask": ltx2.masks(*grid)}
    assert "keyframes" in CASE.row.inputs.conditioning(config, given)
    for change, words in (
        ({"denoise_mask": None}, "^latent_image: the conditioning has guides, and this latent is without the mask"),
        ({"grid": (6, 4, 4)}, "^positive, negative: the guides have 24 tokens, which is no whole number of frames"),
    ):
        with pytest.raises(ValueError, match=words):
            CASE.row.inputs.conditioning(config, given | change)
