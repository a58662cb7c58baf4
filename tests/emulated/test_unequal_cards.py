"""Cards that are unequal, whose kernels for half precision are others, and one card for two ranks, which talk by Gloo."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from testing import mini
from testing.fake_cuda import ADA, TURING
from tests.campaigns.transport.cases import CONFIG, Case, Files, all_of_them, nobody
from tests.support.cpu_and_gpu import both_kinds

pytestmark = pytest.mark.threads

PADDED = {"height": 16, "width": 12, "text": 16}
"""32 tokens a rank: kernels that pad their rows to so many, and those that do not, give the same."""
CASES = "product pipe2", "product ulysses2", "VAE bands on 2"


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp16", marks=pytest.mark.full)])
def test_unequal_cards(files: Files, dtype):
    def run(load: Callable[..., RemoteTransformer], _pool: Callable[[int], Any]) -> list[torch.Tensor]:
        model = load(files.mini(), Degrees(ring=2), dtype=dtype)
        given = mini.inputs(CONFIG, **PADDED)
        prompt, bands = Prompt(given[2], given[2], 1.0), 3
        return [
            model.predict(ModelCall(*given), nobody),
            sample_in_bands(model, given[0], linear_sigmas(3), prompt, bands, 1)[0],
        ]

    with both_kinds(TURING, ADA, devices=lambda world: ("cuda:0", "cuda:1")) as both:
        both.check(run)


@pytest.mark.parametrize("case", [case for case in all_of_them() if case.name in CASES], ids=lambda case: case.name)
def test_two_ranks_on_one_card(files: Files, case: Case):
    """By way of host memory."""
    with both_kinds(ADA, devices=lambda world: ("cuda:0",) * world, nccl=False) as both:
        both.check(functools.partial(case.run, files))
