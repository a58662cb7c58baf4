"""A card has no more memory at some allocation: the error says so and names the rank, and what comes after it works."""

import gc
from collections.abc import Iterator
from itertools import count

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool, RankError
from testing import mini
from testing.fake_cuda import ADA
from testing.models import on_ranks
from tests.campaigns.transport.cases import CONFIG, Files, nobody
from tests.support.cpu_and_gpu import Both, both_kinds

pytestmark = pytest.mark.threads

DEVICES = ("cuda:0", "cuda:1")


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with both_kinds(ADA, ADA, devices=lambda world: DEVICES) as made:
        yield made


def run(pool: Pool, files: Files) -> list[torch.Tensor]:
    """The model is loaded, called, and sampled with in bands."""
    pool.ready.result(timeout=60)
    model = on_ranks(pool, files.mini(), Degrees(pipe=2), "fp32", "sdpa", nobody)
    x, timestep, tensors = mini.inputs(CONFIG, batch=1, height=10, width=8, text=5)
    sampled = sample_in_bands(model, x, linear_sigmas(2), Prompt(tensors, {}, 1.0), 2, 1)[0]
    return [model.predict(ModelCall(x, timestep, tensors), nobody), sampled]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(311, id="every 311th"),
        pytest.param(61, id="every 61st", marks=[pytest.mark.slow, pytest.mark.full]),
    ],
)
def test_no_memory_at_any_allocation(both: Both, files: Files, step):
    """From the n-th on, of each rank in turn. Violations are of no concern: ranks end in the middle of transfers."""
    pool = start(both)
    expected = run(pool, files)
    failed = 0
    for number in count(1, step):
        rank = failed % 2
        pool.close()
        card = both.machine.gpus[rank]
        card.allocations, card.fail_at = 0, number
        pool = start(both)
        try:
            run(pool, files)
            break
        except RankError as error:
            assert f"rank {rank} ({DEVICES[rank]}) failed in" in str(error) and "CUDA out of memory" in str(error)
        finally:
            card.fail_at = None
        failed += 1
        gc.unfreeze()  # which rank threads freeze at their start: what has failed would stay
        if pool.error is not None:
            pool.close()
            pool = start(both)
        assert all(map(torch.equal, run(pool, files), expected))
    pool.close()
    assert failed > 600 // step  # the run has some 700 allocations of each rank


def start(both: Both) -> Pool:
    return Pool(DEVICES, start=both.gpu.start, silence=300)
