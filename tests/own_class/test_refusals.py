"""Models that ranks do not run are refused by their names."""

import pytest

from parallel_backend.checkpoints.single_file import OTHERS, Contents
from parallel_backend.checkpoints.tensor_files import Entry


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.keys[0])
def test_another_model_is_refused_by_its_name(other, tmp_path):
    path = tmp_path / "other.safetensors"
    contents = Contents(path, {key: Entry(key, (1,), "fp32") for key in other.keys}, None, {})
    assert str(contents.refusal()).startswith(f"model_name: other.safetensors is {other.name}, {other.what}. Load it")
