"""Variants of a family that cannot be run, and conditioning that it cannot use, are refused by name."""

import re
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.families.others import OTHERS
from testing.cases import all_cases

CASE = next(case for case in all_cases() if case.name == "wan-animate-2")


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.keys[0])
def test_a_model_without_a_family_is_refused_by_its_name(other, tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({key: torch.zeros(1) for key in other.keys}, path)
    with pytest.raises(ValueError, match=re.escape(f"model_name: other.safetensors is {other.name}, {other.what}. Load it")):
        open_checkpoint(path)


def test_text_that_does_not_fit_is_refused():
    conditioning, width = partial(CASE.row.inputs.conditioning, CASE.config), CASE.config["text_dim"]
    assert conditioning({"context": torch.zeros(1, 5, width)}).keys() == {"context", "reference"}
    with pytest.raises(ValueError, match=r"positive, negative: .* needs text conditioning"):
        conditioning({})
    with pytest.raises(ValueError, match=f"text has width {width + 1}, this model needs {width}"):
        conditioning({"context": torch.zeros(1, 5, width + 1)})
