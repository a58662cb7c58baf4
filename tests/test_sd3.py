"""SD3: both layouts give diffusers' weights, every exact mode gives diffusers' forward, and what cannot run is refused."""

import functools
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoint import open_checkpoint
from parallel_backend.config import Degrees
from parallel_backend.families import FAMILIES
from parallel_backend.layout import Span
from parallel_backend.quickstart.sampling import Prompt, euler, linear_sigmas, sample_in_bands
from parallel_backend.stage import build_stage
from tests import tiny

TOLERANCE = 1e-5
FAMILY = FAMILIES["sd3"]
DEGREES = [
    Degrees(),
    Degrees(pipe=2),
    Degrees(ulysses=2),
    Degrees(batch=2),
    Degrees(ring=2),
    Degrees(tensor=2),
    Degrees(patch=2, patch_mode="displaced"),
    Degrees(pipe=2, ulysses=2),
    Degrees(ulysses=3),
]
CALLS = {
    "batch 2": {"batch": 2},
    "odd sizes": {"batch": 3, "height": 15, "width": 11},
    "few tokens": {"batch": 1, "height": 4, "width": 6, "text": 3},
}


@pytest.fixture(scope="module")
def model():
    return tiny.random_sd3()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return tiny.save_original(model, tiny.SD3, tmp_path_factory.mktemp("sd3") / "sd3.safetensors", family="sd3")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("sd3 folder")
    model.save_pretrained(path)
    return path


def inputs(**size):
    return tiny.inputs(tiny.SD3, **size, family="sd3")


@pytest.mark.parametrize("layout", ["file", "folder"])
def test_both_layouts_give_the_same_weights_and_configuration(request, file, model, layout):
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    assert checkpoint.family is FAMILY
    config = {name: tuple(v) if isinstance(v, list) else v for name, v in checkpoint.config.items()}
    assert {name: config[name] for name in tiny.SD3} == tiny.SD3
    assert checkpoint.original_shapes == {key: tuple(value.shape) for key, value in load_file(file).items()}
    state, expected = tiny.whole_model(checkpoint.path).state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_original_layout_is_that_of_diffusers_converter(file, model):
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    expected = model.state_dict()
    found = convert_sd3_transformer_checkpoint_to_diffusers(load_file(file))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_heads_without_norms_are_64_wide(tmp_path):
    config = tiny.SD3 | {"num_layers": 2, "num_attention_heads": 1, "attention_head_dim": 64, "qk_norm": None}
    model = tiny.random_sd3(config)
    path = tiny.save_original(model, config, tmp_path / "plain.safetensors", "model.diffusion_model.", family="sd3")
    checkpoint = open_checkpoint(path)
    assert {name: checkpoint.config[name] for name in config} == config
    given = inputs()
    assert tiny.relative(tiny.sd3_reference(tiny.whole_model(path), *given), tiny.sd3_reference(model, *given)) == 0


@pytest.mark.parametrize("edges", [(0, 2, 4), (0, 1, 2, 3, 4)])
def test_a_stage_holds_its_own_part(file, model, edges):
    shared = sum(p.nbytes for name, p in model.named_parameters() if name.startswith("time_text_embed"))
    spans = [Span(*pair) for pair in pairwise(edges)]
    stages = [build_stage(open_checkpoint(file), span, torch.device("cpu"), "fp32") for span in spans]
    total = sum(p.nbytes for stage, _, _ in stages for p in stage.parameters())
    assert total == sum(value.nbytes for value in model.state_dict().values()) + (len(stages) - 1) * shared
    assert not [name for stage, _, _ in stages for name, buffer in stage.named_buffers() if buffer.is_meta]


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_one_call_equals_diffusers(pools, file, model, degrees, case, measured):
    given = inputs(**CALLS[case])
    output = pools.load(file, degrees).predict(*given, lambda: None)
    assert output.shape == given[0].shape
    error = tiny.relative(output, tiny.sd3_reference(model, *given))
    measured("relative error of SD3's exact modes", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=2), Degrees(ulysses=3), Degrees(pipe=2, ring=2)], ids=str)
def test_masked_text_is_as_if_it_were_not_there(pools, file, model, degrees):
    x, timestep, tensors = inputs(batch=1, text=9)
    mask = torch.arange(9)[None] < 4
    output = pools.load(file, degrees).predict(x, timestep, tensors | {"text_mask": mask}, lambda: None)
    shorter = tensors | {"context": tensors["context"][:, :4]}
    assert tiny.relative(output, tiny.sd3_reference(model, x, timestep, shorter)) <= TOLERANCE
    assert tiny.relative(output, tiny.sd3_reference(model, x, timestep, tensors)) > 100 * TOLERANCE


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=2), Degrees(pipe=2, ulysses=2)], ids=str)
def test_a_run_of_exact_steps_equals_diffusers(pools, file, model, degrees, measured):
    noise, _, positive = inputs(height=15, width=11)
    prompt, sigmas = Prompt(positive, inputs(seed=2)[2], 3.0), linear_sigmas(3)
    remote = pools.load(file, degrees)
    sample, _ = sample_in_bands(remote, noise, sigmas, prompt, 3, warm_up=3)
    with torch.inference_mode():
        expected = euler(functools.partial(tiny.sd3_reference, model), noise, sigmas, prompt)
    error = tiny.relative(sample, expected)
    measured("relative error of SD3's exact modes", error)
    assert error <= TOLERANCE


def test_bands_with_old_keys_depend_on_the_schedule_alone(pools, file, model):
    noise, _, tensors = inputs()
    prompt, sigmas = Prompt(tensors, {}, 1.0), linear_sigmas(4)
    alone, piped, both = (
        sample_in_bands(pools.load(file, degrees), noise, sigmas, prompt, 4, 1)[0]
        for degrees in (Degrees(), Degrees(pipe=2), Degrees(pipe=2, ulysses=2))
    )
    assert tiny.relative(piped, alone) <= TOLERANCE
    assert tiny.relative(both, alone) <= TOLERANCE
    with torch.inference_mode():
        exact = euler(functools.partial(tiny.sd3_reference, model), noise, sigmas, prompt)
    assert 100 * TOLERANCE < tiny.relative(alone, exact) < 0.5


def test_the_comparison_sees_every_input(pools, file, model):
    x, timestep, tensors = inputs()
    remote, expected = pools.load(file, Degrees(pipe=2)), tiny.sd3_reference(model, x, timestep, tensors)
    for changed in (
        {"timestep": timestep * 1.01},
        {"tensors": tensors | {"pooled": tensors["pooled"].flip(0)}},
        {"tensors": tensors | {"context": tensors["context"].flip(0)}},
        {"x": x.roll(2, dims=2)},
    ):
        given = {"x": x, "timestep": timestep, "tensors": tensors} | changed
        assert tiny.relative(remote.predict(**given, poll=lambda: None), expected) > 100 * TOLERANCE


def test_the_comparison_sees_positions(pools, model, file, tmp_path):
    """The picture is the same one for every token but for where it is."""
    x, timestep, tensors = inputs()
    state = load_file(file)
    state["pos_embed"] = state["pos_embed"].roll(1, dims=1)
    save_file(state, tmp_path / "moved.safetensors")
    moved = pools.load(tmp_path / "moved.safetensors", Degrees(ulysses=2)).predict(x, timestep, tensors, lambda: None)
    assert tiny.relative(moved, tiny.sd3_reference(model, x, timestep, tensors)) > 100 * TOLERANCE


@pytest.mark.parametrize("stages", [1, 2])
def test_fp8_is_close_to_fp32(pools, file, model, stages):
    given = inputs()
    remote = pools.load(file, Degrees(pipe=stages), dtype="fp8_e4m3fn")
    assert 1e-4 < tiny.relative(remote.predict(*given, lambda: None), tiny.sd3_reference(model, *given)) < 0.1


def test_block_costs_can_be_measured(file):
    from parallel_backend.probe import probe

    found = probe(0, open_checkpoint(file), torch.device("cpu"), "fp32", 1.0)
    assert all(seconds > 0 for seconds in found.blocks["transformer_blocks"])


def test_a_second_attention_is_refused_by_name(tmp_path):
    config = tiny.SD3 | {"dual_attention_layers": (0, 1)}
    model = tiny.random_sd3(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^model_name: .*3\.5 medium"):
        open_checkpoint(tmp_path)
    state = {f"joint_blocks.{i}.x_block.attn2.qkv.weight": torch.zeros(192, 64) for i in (0, 1)}
    path = tiny.save_original(tiny.random_sd3(), tiny.SD3, tmp_path / "large.safetensors", family="sd3")
    save_file(load_file(path) | state, tmp_path / "medium.safetensors")
    with pytest.raises(ValueError, match=r"^model_name: .*3\.5 medium"):
        open_checkpoint(tmp_path / "medium.safetensors")


def test_conditioning_of_another_model_is_refused():
    given = {"context": torch.zeros(1, 5, 24), "y": torch.zeros(1, 12)}
    assert FAMILY.conditioning(tiny.SD3, given).keys() == {"context", "pooled"}
    for changed in ({"context": None}, {"y": None}, {"context": torch.zeros(1, 5, 25)}, {"y": torch.zeros(1, 768)}):
        with pytest.raises(ValueError, match=r"^positive, negative: "):
            FAMILY.conditioning(tiny.SD3, given | changed)


def test_a_picture_beyond_the_table_of_positions_is_refused(pools, file):
    given = inputs(height=82)
    with pytest.raises(Exception, match="latent_image: 12 x 82 is too large"):
        pools.load(file, Degrees()).predict(*given, lambda: None)
