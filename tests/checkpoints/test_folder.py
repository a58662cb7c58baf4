"""The files of a diffusers folder: with an index its files alone, and never a tensor from two of them."""

import json

import pytest
from safetensors.torch import save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.checkpoints.folder import INDEX, MAX_INDEX_BYTES
from testing import tiny

ONE, TWO = (f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2))
PLAIN, HALF = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"


@pytest.fixture
def folder(tmp_path, flux_model):
    """The tiny Flux in two files with an index."""
    path = tmp_path / "folder"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel", **tiny.FLUX}))
    state = dict(flux_model.state_dict())
    parts = {ONE: list(state)[::2], TWO: list(state)[1::2]}
    for file, keys in parts.items():
        save_file({key: state[key] for key in keys}, path / file)
    indexed(path, {key: file for file, keys in parts.items() for key in keys})
    return path


def indexed(folder, where, name=INDEX):
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


def index_of(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def whole(folder, flux_model, name, dtype=None):
    save_file({key: value.to(dtype) if dtype else value for key, value in flux_model.state_dict().items()}, folder / name)


def refused(folder, words):
    with pytest.raises(ValueError, match=f"^model_name: .*folder.*{words}"):
        open_checkpoint(folder)


def test_with_an_index_its_files_alone_are_read(folder, flux_model):
    """What else is there, such as another variant, would take the place of what the index means."""
    whole(folder, flux_model, "z.safetensors")
    files = {entry.file.name for entry in open_checkpoint(folder).entries.values()}
    assert files == {ONE, TWO}


def test_a_tensor_in_two_files_is_refused_by_both_names(folder, flux_model):
    for name in (INDEX, ONE, TWO):
        (folder / name).unlink()
    whole(folder, flux_model, PLAIN)
    assert open_checkpoint(folder).dtype == "fp32", "the control"
    whole(folder, flux_model, HALF, flux_model.dtype)
    refused(folder, f"in two files, {HALF} and {PLAIN}")


def test_a_tensor_in_two_files_of_an_index_is_refused_too(folder, flux_model):
    whole(folder, flux_model, TWO)
    refused(folder, f"in two files, {ONE} and {TWO}")


def test_an_interrupted_download_lacks_a_file(folder):
    (folder / TWO).unlink()
    refused(folder, f"lacks {TWO}")


def test_a_file_of_another_version_does_not_have_what_the_index_says(folder):
    where = index_of(folder)
    key = next(iter(where))
    indexed(folder, where | {key: TWO if where[key] == ONE else ONE})
    refused(folder, f"index that says that {key} is in .* where it is not")


def test_a_tensor_that_only_the_index_has_is_missing(folder):
    indexed(folder, index_of(folder) | {"more.weight": ONE})
    refused(folder, f"more.weight is in {ONE}, where it is not")


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b.safetensors", "x.bin", "", 7, None]
)
def test_an_index_leads_nowhere_else(folder, name):
    where = index_of(folder)
    indexed(folder, where | {next(iter(where)): name})
    refused(folder, "is no name of a safetensors file in this folder")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_a_damaged_index_is_refused(folder, text):
    (folder / INDEX).write_text(text)
    refused(folder, "which is damaged")


def test_a_long_index_is_not_read(folder):
    with (folder / INDEX).open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    refused(folder, "or too long")


def test_the_usual_index_counts_and_two_others_are_refused(folder):
    where = index_of(folder)
    indexed(folder, {"a": "b.safetensors"}, "diffusion_pytorch_model.safetensors.index.fp16.json")
    assert open_checkpoint(folder).family.name == "flux"
    indexed(folder, where, "diffusion_pytorch_model.fp32.safetensors.index.json")
    (folder / INDEX).unlink()
    refused(folder, "two variants of a model, by diffusion_pytorch_model.fp32.* and .*index.fp16.json")
