"""How a class with many heads is made narrower for its trial."""

import dataclasses
import json
from unittest import mock

import pytest
import torch

from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.trials import short_model
from tests.support.planted_comfyui import planted


@pytest.mark.parametrize(
    ("numbers", "text", "first"),
    [
        # heads of keys go with the most heads, heads for text alone stay; -1 is a UNet's "not set"
        (
            {"heads": 48, "kvheads": 12, "txtheads": 20, "num_heads": -1, "features": 6144, "txtdim": 2560},
            (12 * 2560, 12 * 320),
            {"heads": 8, "kvheads": 2, "features": 1024, "txtdim": 320},
        ),
        # too few heads of keys to have fewer
        (
            {"num_attention_heads": 28, "num_kv_heads": 7, "hidden_size": 3360},
            (3360, 1680),
            {"num_attention_heads": 14, "hidden_size": 1680},
        ),
        # widths that do not go with the heads
        (
            {"num_heads": 24, "hidden_size": 3072, "hidden_dim": 5120},
            (3072, 512),
            {"num_heads": 4, "hidden_size": 512, "hidden_dim": 640},
        ),
    ],
)
def test_heads_and_widths_of_the_first_narrower_class(numbers, text, first):
    own = dataclasses.replace(planted("Scaled"), arguments="{}")
    call = Call(torch.zeros(1, 4, 2, 4, 6), torch.ones(1), {"context": torch.zeros(1, 5, text[0])})
    with mock.patch.object(short_model, "numbers_of_class", return_value=numbers):
        narrower, of_narrow, _ = next(short_model.narrowed(own, call, 2))
    assert json.loads(narrower.arguments) == first
    assert of_narrow.named["context"].shape[-1] == text[1]


@pytest.mark.parametrize(("heads", "ranks", "fewer"), [(40, 3, 5), (38, 4, 19), (24, 3, 3)])
def test_ranks_share_fewer_heads_evenly_if_they_share_all_so(heads, ranks, fewer):
    own = dataclasses.replace(planted("Scaled"), arguments="{}")
    with mock.patch.object(short_model, "numbers_of_class", return_value={"heads": heads}):
        narrower, _, _ = next(short_model.narrowed(own, Call(torch.zeros(1, 4, 2, 4, 6), torch.ones(1), {}), ranks))
    assert json.loads(narrower.arguments) == {"heads": fewer}
