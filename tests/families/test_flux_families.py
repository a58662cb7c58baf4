"""Flux.1 and its kin: which files are theirs, the other names that files give their norms, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.families import FAMILIES
from testing import tiny
from testing.cases import flux

CASES = {case.name: case for case in flux.CASES}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """`file(name)`: that case's model as a single file."""
    base, made = tmp_path_factory.mktemp("flux families"), {}

    def save(name):
        if name not in made:
            made[name] = CASES[name].save(CASES[name].model(), base / f"{name}.safetensors")
        return made[name]

    return save


def detected(shapes):
    return [family.name for family in FAMILIES.values() if family.file.detect(shapes)]


@pytest.mark.parametrize("name", CASES)
def test_each_is_one_familys_alone(file, name):
    assert detected({key: tuple(value.shape) for key, value in load_file(file(name)).items()}) == [CASES[name].family]


@pytest.mark.parametrize(
    ("instead_of", "keys"),
    [
        ("txt_in.weight", {"txt_in.input_embedder.weight": (128, 64)}),  # HunyuanVideo
        ("vector_in.in_layer.weight", {}),  # LongCat-Image, were it not for the embedded guidance
    ],
)
def test_what_has_fluxs_blocks_is_not_taken_for_flux(file, instead_of, keys):
    shapes = {key: tuple(value.shape) for key, value in load_file(file("flux-dev")).items()} | keys
    del shapes[instead_of]
    assert detected(shapes) == []


def test_norms_by_their_other_name(file, tmp_path):
    """ComfyUI saves them by it."""
    state = load_file(file("flux-dev"))
    usual, other = ".scale", ".weight"
    renamed = {key.removesuffix(usual) + other if key.endswith(usual) else key: v for key, v in state.items()}
    assert renamed.keys() != state.keys()
    save_file(renamed, tmp_path / "renamed.safetensors")
    found, expected = (tiny.whole_model(path).state_dict() for path in (tmp_path / "renamed.safetensors", file("flux-dev")))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("flux-dev", {"context": torch.zeros(1, 7, 24), "y": torch.zeros(1, 12)}, "guidance is switched off"),
    ],
)
def test_conditioning_that_cannot_be_forwarded_is_refused_by_name(file, name, given, words):
    checkpoint = open_checkpoint(file(name))
    with pytest.raises(ValueError, match=f"^positive, negative: .*{words}"):
        checkpoint.family.inputs.conditioning(checkpoint.config, given)


def test_flux_without_pooled_text_takes_zeros(file):
    checkpoint = open_checkpoint(file("flux-dev"))
    given = {"context": torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0)), "guidance": torch.full((2,), 3.5)}
    pooled = checkpoint.family.inputs.conditioning(checkpoint.config, given)["pooled"]
    assert torch.equal(pooled, torch.zeros(2, checkpoint.config["pooled_projection_dim"]))
