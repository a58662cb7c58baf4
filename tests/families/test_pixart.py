"""PixArt: folders of older versions, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.families import FAMILIES
from testing import tiny
from testing.cases import pixart

pytestmark = pytest.mark.threads

ALPHA, SIGMA = pixart.CASES
OLD = {"_class_name": "Transformer2DModel", "norm_type": "ada_norm_single"}


def shapes_of(path):
    return {key: tuple(value.shape) for key, value in load_file(path).items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Case -> its single file."""
    base = tmp_path_factory.mktemp("files")
    return {case.name: case.save(case.model(), base / f"{case.name}.safetensors") for case in pixart.CASES}


def folder_of(case, base, **changes):
    case.model().save_pretrained(base / "folder")
    path = base / "folder" / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return base / "folder"


@pytest.mark.parametrize("case", pixart.CASES, ids=lambda case: case.name)
def test_one_family_alone_takes_the_file(case, files):
    shapes = shapes_of(files[case.name])
    assert [family.name for family in FAMILIES.values() if family.file.detect(shapes)] == [case.family]


@pytest.mark.parametrize("given", [None, ...], ids=["null", "absent"])
def test_folders_of_an_older_diffusers_are_pixart(tmp_path, given):
    """As PixArt-XL-2-1024-MS has it; that the sizes are looked at follows from the sample size."""
    path = folder_of(ALPHA, tmp_path, **OLD, use_additional_conditions=given)
    assert open_checkpoint(path).family is ALPHA.row
    expected = ALPHA.model().state_dict()
    found = tiny.whole_model(path).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "changes", [{"_class_name": "Transformer2DModel", "norm_type": "ada_norm_zero"}, {"_class_name": ...}]
)
def test_other_folders_of_that_class_are_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=r"model_name: folder is a diffusers folder with a .*, which is not read"):
        open_checkpoint(folder_of(ALPHA, tmp_path, **changes))


def test_a_table_of_positions_says_what_the_model_was_trained_for(files):
    shapes = shapes_of(files["pixart-sigma"])
    configure = SIGMA.row.file.configure
    assert [configure(shapes | {"pos_embed": (1, side**2, 216)})["sample_size"] for side in (16, 64)] == [32, 128]


def test_models_that_predict_no_variance_are_refused(files):
    shapes, key, file = shapes_of(files["pixart-sigma"]), "final_layer.linear.weight", SIGMA.row.file
    halved = (shapes[key][0] // 2, shapes[key][1])
    with pytest.raises(ValueError, match=r"model_name: this .* predicts no variance"):
        file.key_map(file.configure(shapes | {key: halved}))
