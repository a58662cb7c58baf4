"""What a single file's header says of its model: a file that is not what its tensors look like is refused by name."""

import json

import pytest
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from testing.cases import wan_animate_2

KIND = {"model_type": "animate2"}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """`said(config)`: a file of Wan Animate 2 whose header's field `config` is this text."""
    case, folder = wan_animate_2.CASES[0], tmp_path_factory.mktemp("headers")
    tensors, path = load_file(case.save(case.model(), folder / "whole.safetensors")), folder / "said.safetensors"

    def make(config: str):
        save_file(tensors, path, {"config": config})
        return path

    return make


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"causal_ar": True}, "its causal_ar is true.*causal_ar false only"),
        ({"num_heads": 7}, "its num_heads is 7"),
        ({"of_next_year": 0}, "its of_next_year is 0.*does not know this value"),
    ],
)
def test_another_model_than_the_tensors_show_is_refused(said, fields, words):
    with pytest.raises(ValueError, match=f"^model_name: said.safetensors says in its header that {words}"):
        open_checkpoint(said(json.dumps({"transformer": KIND | fields})))


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"transformer": 1}', '{"transformer": ' * 9])
def test_a_config_that_is_no_json_is_refused(said, text):
    with pytest.raises(ValueError, match=r"^model_name: said.safetensors has a header whose field config is not JSON"):
        open_checkpoint(said(text))


def test_what_changes_nothing_is_allowed(said):
    fields = KIND | {"causal_ar": False}
    assert open_checkpoint(said(json.dumps({"transformer": fields}))).family.name == "wan-animate-2"
