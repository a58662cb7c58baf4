"""PixArt, HunyuanDiT and Sana: folders of older versions, what is refused, and Sana's exchange between ranks."""

import json

import pytest
import torch
from safetensors.torch import load_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.validate import check_model
from parallel_backend.families import FAMILIES
from testing import tiny
from testing.cases import hunyuan_dit, pixart, sana

pytestmark = pytest.mark.threads

ALPHA, SIGMA = pixart.CASES
CASES = (*pixart.CASES, *hunyuan_dit.CASES, *sana.CASES)
OLD = {"_class_name": "Transformer2DModel", "norm_type": "ada_norm_single"}


def shapes_of(path):
    return {key: tuple(value.shape) for key, value in load_file(path).items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Case -> its single file."""
    base = tmp_path_factory.mktemp("files")
    return {case.name: case.save(case.model(), base / f"{case.name}.safetensors") for case in CASES}


def folder_of(case, base, **changes):
    case.model().save_pretrained(base / "folder")
    path = base / "folder" / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return base / "folder"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
    with pytest.raises(ValueError, match=r"model_name: folder is a .*, which this version does not know"):
        open_checkpoint(folder_of(ALPHA, tmp_path, **changes))


def test_a_table_of_positions_says_what_the_model_was_trained_for(files):
    shapes = shapes_of(files["pixart-sigma"])
    configure = SIGMA.row.file.configure
    assert [configure(shapes | {"pos_embed": (1, side**2, 216)})["sample_size"] for side in (16, 64)] == [32, 128]
    shapes, configure = shapes_of(files["sana"]), FAMILIES["sana"].file.configure
    found = [configure(shapes | {"pos_embed": (1, side**2, 224)})["interpolation_scale"] for side in (16, 32, 64, 128)]
    assert found == [None, None, 1.0, 2.0]


def test_models_that_predict_no_variance_are_refused(files):
    for name, key in {"pixart-sigma": "final_layer.linear.weight", "hunyuan-dit-1.2": "final_layer.linear.weight"}.items():
        case = next(case for case in CASES if case.name == name)
        shapes = shapes_of(files[name])
        halved = (shapes[key][0] // 2, shapes[key][1])
        with pytest.raises(ValueError, match=r"model_name: this .* predicts no variance"):
            case.row.file.key_map(case.row.file.configure(shapes | {key: halved}))


def test_sana_sprint_is_refused(files):
    row = FAMILIES["sana"]
    with pytest.raises(ValueError, match="model_name: this is Sana Sprint"):
        row.file.key_map(row.file.configure(shapes_of(files["sana"]) | {"cfg_embedder.mlp.0.weight": (224, 256)}))


def test_texts_that_hunyuan_dit_cannot_use_are_refused():
    case = hunyuan_dit.CASES[1]
    tensors = case.inputs()[2]

    def conditioning(**given):
        return case.row.inputs.conditioning(case.config, given)

    assert conditioning(**tensors).keys() == tensors.keys()
    for name in ("encoder_hidden_states_t5", "text_embedding_mask", "text_embedding_mask_t5"):
        with pytest.raises(ValueError, match="positive, negative: this conditioning lacks T5's text or a mask"):
            conditioning(**{other: value for other, value in tensors.items() if other != name})
    longer = torch.cat((tensors["context"], tensors["context"]), dim=1)
    with pytest.raises(ValueError, match="the prompt has 10 tokens of CLIP and 6 of T5, this model takes 5 and 6"):
        conditioning(**tensors | {"context": longer})


@pytest.mark.parametrize(
    ("degrees", "widget"),
    [
        (Degrees(pipe=2), "pipefusion_degree"),
        (Degrees(tensor=2), "tensor_parallel_degree"),
        (Degrees(patch=2, patch_mode="displaced"), "patch_degree"),
        (Degrees(patch=2, patch_mode="naive"), "patch_degree"),
    ],
    ids=str,
)
def test_axes_that_sana_lacks_are_refused(files, pools, degrees, widget):
    message = f"{widget} is 2, but this kind of model cannot be cut so. Set it to 1 and use ulysses_degree or ring_degree"
    with pytest.raises(ValueError, match=message):
        check_model(degrees, heads=7, blocks=3, unsupported=FAMILIES["sana"].unsupported)
    check_model(degrees, heads=7, blocks=3)
    with pytest.raises(ValueError, match=message):
        pools.load(files["sana"], degrees)


def test_sana_is_not_sampled_in_bands(files, pools):
    with pytest.raises(ValueError, match="model: sana has no attention that could use old keys"):
        pools.load(files["sana"], Degrees()).open_run()


@pytest.mark.parametrize("sizes", [(9, 5), (2, 11), (30, 2), (5, 1), (2, 2)], ids=str)
def test_shards_of_any_length_see_their_neighbours(files, pools, measured, sizes):
    """From long ones to some that are shorter than a row, down to one token."""
    case = sana.CASES[0]
    model, given = case.model(), case.inputs(latent=(6, *sizes))
    with torch.inference_mode():
        expected = case.reference(model, *given)
    found = pools.load(files["sana"], Degrees(ring=2, ulysses=2)).predict(ModelCall(*given), lambda: None)
    error = tiny.relative(found, expected)
    measured(f"relative error of Sana on four ranks, {sizes[0]} x {sizes[1]}", error)
    assert error <= 1e-5


def test_the_comparison_sees_what_is_beyond_a_shard():
    case = sana.CASES[0]
    model, (x, timestep, tensors) = case.model(), case.inputs()
    with torch.inference_mode():
        whole = case.reference(model, x, timestep, tensors)
        halves = [case.reference(model, half, timestep, tensors) for half in x.split(4, dim=2)]
    assert tiny.relative(torch.cat(halves, dim=2), whole) > 1e-2
