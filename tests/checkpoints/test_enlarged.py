"""A checkpoint of which a LoRA enlarges layers: the values of the file with zeros behind them."""

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import open_own_class, open_setup
from parallel_backend.checkpoints.reader import reading
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Shard, Span
from parallel_backend.quickstart.model import mini_flux
from testing import mini

CHANNELS, PATCHES, WIDTH = 16, 4, mini.CONFIG["width"]
FIRST, LAST = "img_in.weight", "final_layer.linear"
LARGER = (
    (FIRST, (WIDTH, 2 * CHANNELS * PATCHES)),
    (f"{LAST}.weight", (2 * CHANNELS * PATCHES, WIDTH)),
    (f"{LAST}.bias", (2 * CHANNELS * PATCHES,)),
)
OF_TWICE_THE_CHANNELS = mini_flux(**mini.CONFIG | {"channels": 2 * CHANNELS})


def test_values_of_the_file_have_zeros_behind_them(mini_file):
    checkpoint, host = open_own_class(mini_file, mini.proven()), torch.device("cpu")
    setup = Setup(mini_file, "fp8_e4m3fn", ("cpu",), Degrees(), "auto", enlarged=LARGER, own_class=OF_TWICE_THE_CHANNELS)
    larger = open_setup(setup)
    assert {key: larger.original_shapes[key] for key, _ in LARGER} == dict(LARGER)
    assert larger.storage(FIRST, "fp8_e4m3fn") is None, "in the compute dtype: no file has it packed"
    with reading(checkpoint) as before, reading(larger) as after:
        values, whole = (each.values(FIRST, torch.float32, None, host) for each in (before, after))
        assert torch.equal(whole[:, : values.shape[1]], values) and not whole[:, values.shape[1] :].any()
        shard = Shard(1, (Span(values.shape[1] - 2, values.shape[1] + 3),))
        assert torch.equal(after.values(FIRST, torch.float32, shard, host), whole[:, shard.spans[0].slice])
        assert torch.equal(*(each.values("txt_in.weight", torch.float32, None, host) for each in (before, after)))


def test_sizes_that_the_class_has_not_are_refused(mini_file):
    with pytest.raises(ValueError, match=r"^model_name: .* has final_layer\.linear\.\w+ in the shape"):
        open_own_class(mini_file, OF_TWICE_THE_CHANNELS, enlarged=LARGER[:1])
