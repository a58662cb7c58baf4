"""Variants of a family that cannot be run, and conditioning that it cannot use, are refused by name."""

import inspect
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.checkpoints.limits import check_settings
from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import REFERENCE_POSITIONS, REFERENCES_AT_ZERO, TEXT_MASK
from parallel_backend.families.others import OTHERS
from parallel_backend.families.parts.references import AT_ZERO
from testing.cases import krea2, qwen_image

CASES = {"qwen-image": qwen_image.CASES[0]}
WIDTH = 24  # of their text


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Family -> (single file, diffusers folder)."""
    base, made = tmp_path_factory.mktemp("refusals"), {}
    for name, case in CASES.items():
        model = case.model()
        model.save_pretrained(base / name)
        made[name] = case.save(model, base / f"{name}.safetensors"), base / name
    return made


@pytest.fixture(scope="module")
def conditioning(files):
    """`conditioning(family, **given)`: what the family makes of ComfyUI's arguments."""
    configs = {name: open_checkpoint(path).config for name, (path, _) in files.items()}
    return lambda name, **given: FAMILIES[name].inputs.conditioning(configs[name], given)


def test_what_marks_an_edit_checkpoint_does_no_harm(files, tmp_path):
    path = tmp_path / "marked.safetensors"
    save_file(load_file(files["qwen-image"][0]) | {"__index_timestep_zero__": torch.zeros(0)}, path)
    assert open_checkpoint(path).family.name == "qwen-image"


def test_mage_flow_is_not_taken_for_qwen_image(files):
    shapes = {key: tuple(value.shape) for key, value in load_file(files["qwen-image"][0]).items()}
    detect = FAMILIES["qwen-image"].file.detect
    assert detect(shapes)
    assert not detect(shapes | {"txt_norm.weight": (2560,), "proj_out.weight": (128, 64)})


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.keys[0])
def test_a_model_without_a_family_is_refused_by_its_name(other, tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({key: torch.zeros(1) for key in other.keys}, path)
    with pytest.raises(ValueError, match=re.escape(f"model_name: other.safetensors is {other.name}, {other.what}. Load it")):
        open_checkpoint(path)


@pytest.mark.parametrize("family", CASES)
def test_text_that_does_not_fit_is_refused(conditioning, family):
    assert conditioning(family, context=torch.zeros(1, 5, WIDTH)).keys() == {"context"}
    with pytest.raises(ValueError, match=r"positive, negative: .* needs text conditioning"):
        conditioning(family)
    with pytest.raises(ValueError, match=f"text has width {WIDTH + 1}, this model needs {WIDTH}"):
        conditioning(family, context=torch.zeros(1, 5, WIDTH + 1))


def test_masks_reach_the_ranks_where_comfyui_uses_them(conditioning):
    given = {"context": torch.zeros(1, 3, WIDTH), "attention_mask": torch.tensor([[1, 1, 0]])}
    assert conditioning("qwen-image", **given)[TEXT_MASK].tolist() == [[True, True, False]]


def test_krea_has_references_where_a_method_is_given():
    given = {"context": torch.zeros(1, 3, krea2.WIDTH), "ref_latents": [torch.zeros(1, 16, 1, 4, 4)]}
    found = {
        method: FAMILIES["krea2"].inputs.conditioning(krea2.CONFIG, given | {"ref_latents_method": method})
        for method in (None, "offset", AT_ZERO)
    }
    assert found[None].keys() == {"context"}
    assert found["offset"][REFERENCE_POSITIONS][0].tolist() == [[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]]
    assert [REFERENCES_AT_ZERO in tensors for tensors in found.values()] == [False, False, True]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_limits_settings_that_its_class_has(family):
    """A misspelt one would limit nothing."""
    limits, layout = family.file.max_settings, family.file
    known = inspect.signature(family.transformer_class().__init__).parameters
    assert limits.keys() <= {*known, *layout.settings}
    for setting, most in limits.items():
        check_settings("a file", layout, {setting: most}, {}, 1)
        with pytest.raises(ValueError, match=f"a file says that its {setting} is {most + 1}"):
            check_settings("a file", layout, {setting: most + 1}, {}, 1)
