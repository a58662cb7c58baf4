"""What test_families.py does not ask of SD3: text masks, positions, heads without norms, fp8, and what is refused."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.families import FAMILIES
from parallel_backend.rank.stage.build import build_stage
from testing import tiny

pytestmark = pytest.mark.threads

TOLERANCE = 1e-5
FAMILY = FAMILIES["sd3"]


@pytest.fixture(scope="module")
def model():
    return tiny.random_sd3()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return tiny.save_original(model, tiny.SD3, tmp_path_factory.mktemp("sd3") / "sd3.safetensors", family="sd3")


def inputs(**size):
    return tiny.inputs(tiny.SD3, **size, family="sd3")


def test_heads_without_norms_are_64_wide(tmp_path):
    config = tiny.SD3 | {"num_layers": 2, "num_attention_heads": 1, "attention_head_dim": 64, "qk_norm": None}
    model = tiny.random_sd3(config)
    path = tiny.save_original(model, config, tmp_path / "plain.safetensors", "model.diffusion_model.", family="sd3")
    checkpoint = open_checkpoint(path)
    assert {name: checkpoint.config[name] for name in config} == config
    given = inputs()
    assert tiny.relative(tiny.sd3_reference(tiny.whole_model(path), *given), tiny.sd3_reference(model, *given)) < 1e-6


@pytest.mark.parametrize("edges", [(0, 2, 4), (0, 1, 2, 3, 4)])
def test_a_stage_holds_its_own_part(file, model, edges):
    shared = sum(p.nbytes for name, p in model.named_parameters() if name.startswith("time_text_embed"))
    spans = [Span(*pair) for pair in pairwise(edges)]
    stages = [build_stage(open_checkpoint(file), span, torch.device("cpu"), "fp32") for span in spans]
    total = sum(p.nbytes for stage in stages for p in stage.model.parameters())
    assert total == sum(value.nbytes for value in model.state_dict().values()) + (len(stages) - 1) * shared
    assert not [name for stage in stages for name, buffer in stage.model.named_buffers() if buffer.is_meta]


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=2), Degrees(ulysses=3), Degrees(pipe=2, ring=2)], ids=str)
def test_masked_text_is_as_if_it_were_not_there(pools, file, model, degrees):
    x, timestep, tensors = inputs(batch=1, text=9)
    mask = torch.arange(9)[None] < 4
    output = pools.load(file, degrees).predict(ModelCall(x, timestep, tensors | {"text_mask": mask}), lambda: None)
    shorter = tensors | {"context": tensors["context"][:, :4]}
    assert tiny.relative(output, tiny.sd3_reference(model, x, timestep, shorter)) <= TOLERANCE
    assert tiny.relative(output, tiny.sd3_reference(model, x, timestep, tensors)) > 100 * TOLERANCE


def test_the_comparison_sees_positions(pools, model, file, tmp_path):
    """The picture is the same one for every token but for where it is."""
    x, timestep, tensors = inputs()
    state = load_file(file)
    state["pos_embed"] = state["pos_embed"].roll(1, dims=1)
    save_file(state, tmp_path / "moved.safetensors")
    moved = pools.load(tmp_path / "moved.safetensors", Degrees(ulysses=2)).predict(
        ModelCall(x, timestep, tensors), lambda: None
    )
    assert tiny.relative(moved, tiny.sd3_reference(model, x, timestep, tensors)) > 100 * TOLERANCE


@pytest.mark.parametrize("stages", [1, 2])
def test_fp8_is_close_to_fp32(pools, file, model, stages):
    given = inputs()
    remote = pools.load(file, Degrees(pipe=stages), dtype="fp8_e4m3fn")
    assert 1e-4 < tiny.relative(remote.predict(ModelCall(*given), lambda: None), tiny.sd3_reference(model, *given)) < 0.1


def test_block_costs_can_be_measured(file):
    from parallel_backend.rank.block_probe import probe

    found = probe(0, open_checkpoint(file), torch.device("cpu"), "fp32", (32, 8))
    assert all(seconds > 0 for seconds in found.blocks["transformer_blocks"])


def test_conditioning_of_another_model_is_refused():
    given = {"context": torch.zeros(1, 5, 24), "y": torch.zeros(1, 12)}
    assert FAMILY.inputs.conditioning(tiny.SD3, given).keys() == {"context", "pooled"}
    for changed in ({"context": None}, {"y": None}, {"context": torch.zeros(1, 5, 25)}, {"y": torch.zeros(1, 768)}):
        with pytest.raises(ValueError, match=r"^positive, negative: "):
            FAMILY.inputs.conditioning(tiny.SD3, given | changed)


def test_a_picture_beyond_the_table_of_positions_is_refused(pools, file):
    given = inputs(height=82)
    with pytest.raises(Exception, match="latent_image: 12 x 82 is too large"):
        pools.load(file, Degrees()).predict(ModelCall(*given), lambda: None)
