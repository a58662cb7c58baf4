"""A Turing beside an Ada: their attention kernels for half precision are others, and so is what they have of bf16."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from testing import mini
from tests.campaigns.transport.cases import CONFIG, Files, nothing
from tests.support.cpu_and_gpu import Both, both_kinds
from tests.support.fake_cuda import ADA, TURING

pytestmark = pytest.mark.threads

PADDED = {"height": 16, "width": 12, "text": 16}
"""32 tokens a rank: kernels that pad their rows to so many, and those that do not, give the same."""


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with both_kinds(TURING, ADA, devices=lambda world: ("cuda:0", "cuda:1")) as made:
        yield made


@pytest.mark.parametrize(
    ("degrees", "dtype"),
    [
        (Degrees(ring=2), "fp32"),
        pytest.param(Degrees(ring=2), "fp16", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_unequal_cards(both: Both, files: Files, degrees, dtype):
    def run(load: Callable[..., RemoteTransformer], _pool: Callable[[int], Any]) -> list[torch.Tensor]:
        model = load(files.mini(), degrees, dtype=dtype)
        given = mini.inputs(CONFIG, **PADDED)
        prompt, bands = Prompt(given[2], given[2], 1.0), 3
        return [
            model.predict(ModelCall(*given), nothing),
            sample_in_bands(model, given[0], linear_sigmas(3), prompt, bands, 1)[0],
        ]

    both.check(run)
