"""What a single file's header says of its model: a file that is not what its tensors look like is refused by name."""

import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.families import FAMILIES
from testing.cases import wan_animate_2
from testing.gguf_files import write_gguf

CASES = {"wan-animate-2": wan_animate_2.CASES[0]}
KIND = {"model_type": "animate2"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(family, what the header says) -> a file of the family under that header."""
    folder = tmp_path_factory.mktemp("headers")
    tensors = {}

    def make(family: str, said: dict):
        if family not in tensors:
            case = CASES[family]
            tensors[family] = load_file(case.save(case.model(), folder / f"{family}.safetensors"))
        path = folder / "said.safetensors"
        save_file(tensors[family], path, {"config": json.dumps({"transformer": said})})
        return path

    return make


@pytest.mark.parametrize(
    ("family", "said", "words"),
    [
        ("wan-animate-2", {"causal_ar": True}, "its causal_ar is true.*causal_ar false only"),
        ("wan-animate-2", {"num_heads": 7}, "its num_heads is 7"),
        ("wan-animate-2", {"of_next_year": 0}, "its of_next_year is 0.*does not know what that is"),
    ],
)
def test_another_model_than_the_tensors_show_is_refused(files, family, said, words):
    with pytest.raises(ValueError, match=f"^model_name: said.safetensors says in its header that {words}"):
        open_checkpoint(files(family, KIND | said))


def test_what_changes_nothing_is_allowed(files):
    assert open_checkpoint(files("wan-animate-2", KIND | {"causal_ar": False})).family.name == "wan-animate-2"


def test_a_gguf_file_has_its_header_as_a_text(tmp_path):
    case = wan_animate_2.CASES[0]
    path = case.save(case.model(), tmp_path / "whole.safetensors")
    with safe_open(path, "pt") as file:
        texts = file.metadata()
    values = {key: (value.float().numpy(), "F32") for key, value in load_file(path).items() if value.numel()}
    shapes = {key: value.shape for key, (value, _) in values.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "whole.gguf", values, shapes, texts))
    assert checkpoint.family.name == case.family
    assert (checkpoint.config, checkpoint.stated) == (
        open_checkpoint(path).config,
        json.loads(texts["config"])["transformer"],
    )


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"transformer": 1}', '{"transformer": ' * 9])
@pytest.mark.parametrize("family", CASES)
def test_a_config_that_is_no_json_counts_where_comfyui_reads_it(files, family, text):
    path = files(family, KIND)
    save_file(load_file(path), path, {"config": text})
    if FAMILIES[family].file.header is None:
        assert open_checkpoint(path).stated == {}
    else:
        with pytest.raises(ValueError, match=r"^model_name: said.safetensors has a header whose field config is no JSON"):
            open_checkpoint(path)


def test_all_that_the_weights_show_may_be_said(files):
    config = open_checkpoint(files("wan-animate-2", KIND)).config
    values = {entry: known(config) for entry, known in FAMILIES["wan-animate-2"].file.header.values.items()}
    for last in (0, -1):
        said = {entry: possible[last] for entry, possible in values.items()}
        checkpoint = open_checkpoint(files("wan-animate-2", said))
        assert checkpoint.config == config
        assert checkpoint.stated == json.loads(json.dumps(said))
