"""A checkpoint of which a LoRA enlarges the first layer: the values of the file with zeros behind them."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.checkpoints.enlarged import enlarge
from parallel_backend.checkpoints.own_class import open_setup
from parallel_backend.checkpoints.reader import reading
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Shard, Span
from testing.cases import wan_animate_2


@pytest.fixture
def opened(tmp_path):
    """(checkpoint, key and name of its first layer, the layer's larger shape)."""
    case, key, name = wan_animate_2.CASES[0], "patch_embedding.weight", "patch_embedding.video.weight"
    checkpoint = open_checkpoint(case.save(case.model(), tmp_path / "model.safetensors"))
    rows, columns, *rest = checkpoint.shape(name)
    return checkpoint, key, name, (rows, 2 * columns, *rest)


def test_values_of_the_file_have_zeros_behind_them(opened):
    checkpoint, key, name, shape = opened
    setup = Setup(checkpoint.path, "fp8_e4m3fn", ("cpu",), Degrees(), "auto", enlarged=((key, shape),))
    larger, host = open_setup(setup), torch.device("cpu")
    assert larger.shape(name) == shape and larger.original_shapes[key] == shape
    assert larger.config == checkpoint.config | {"in_channels": 2 * checkpoint.config["in_channels"]}
    assert larger.storage(name, "fp8_e4m3fn") is None, "in the compute dtype: no file has it packed"
    with reading(checkpoint) as before, reading(larger) as after:
        values, whole = (each.values(name, torch.float32, None, host) for each in (before, after))
        assert torch.equal(whole[:, : values.shape[1]], values) and not whole[:, values.shape[1] :].any()
        shard = Shard(1, (Span(values.shape[1] - 2, values.shape[1] + 3),))
        assert torch.equal(after.values(name, torch.float32, shard, host), whole[:, shard.spans[0].slice])
        other = next(target for target in checkpoint.key_map if target != name)
        assert torch.equal(*(each.values(other, torch.float32, None, host) for each in (before, after)))


@pytest.mark.parametrize("change", ["rows", "another layer", "no layer"])
def test_what_no_model_of_the_family_has_is_refused(opened, change):
    checkpoint, key, _, (rows, *rest) = opened
    sizes = {
        "rows": (key, (2 * rows, *rest)),
        "another layer": (next(name for name, shape in checkpoint.original_shapes.items() if len(shape) == 1), (3 * rows,)),
        "no layer": ("nothing.weight", (1, 1)),
    }[change]
    with pytest.raises(ValueError, match=rf"^model: a LoRA that enlarges {sizes[0]} to .* cannot run on ranks"):
        enlarge(checkpoint, (sizes,))
    assert enlarge(checkpoint, ()) is checkpoint and replace(checkpoint).smaller is None
