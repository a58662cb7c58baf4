"""CUDA graphs of micro-steps on a real device, whose kernels, streams and memory the CPU's recorder knows nothing of."""

from collections.abc import Callable, Iterator

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from tests.rank.test_micro_step_graphs import both, load, sampled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda:0"
ALLOCATION = 512
"""Bytes that torch's allocator takes for a number."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Pool]]:
    """By number of ranks, which share the first device."""
    made: dict[int, Pool] = {}

    def pool(ranks: int) -> Pool:
        if ranks not in made:
            made[ranks] = Pool((DEVICE,) * ranks)
            made[ranks].ready.result(timeout=300)
        return made[ranks]

    yield pool
    for each in made.values():
        each.close()


@pytest.mark.parametrize(("ranks", "dtype"), [pytest.param(1, "fp32", marks=pytest.mark.full), (2, "bf16")])
def test_a_run_with_graphs_gives_the_same_bits(ranks, dtype, pools, mini_file):
    stats = both(pools(ranks), mini_file, Degrees(pipe=ranks), dtype)
    assert all(each.captured and each.replayed for each in stats)


def test_graphs_end_with_their_run_and_leave_no_memory(pools, mini_file):
    """Runs in turn give the same, and the peak of the later ones is that of the first."""
    model = load(pools(1), mini_file, Degrees(), True)
    runs = [sampled(model, seeds=(1, 2)) for _ in range(5)]
    assert all(torch.equal(found, runs[0][0]) for found, _ in runs)
    later = [each for _, stats in runs[1:] for each in stats]
    assert len({(each.captured, each.replayed) for each in later}) == 1
    peaks = [each.peak_bytes for each in later]
    assert max(peaks) - min(peaks) <= ALLOCATION
