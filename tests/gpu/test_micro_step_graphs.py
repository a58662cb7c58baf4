"""CUDA graphs of micro-steps on a real device, whose kernels, streams and memory the CPU's recorder knows nothing of."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.finite_check import CHECKSUMS
from tests.rank.test_lora import lora
from tests.rank.test_micro_step_graphs import both, counts, load, named, of_a_class, sampled, whole_calls

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


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        return named(name).save(named(name).model(), tmp_path_factory.mktemp(name) / "model.safetensors")

    return save


DEFAULT = (("flux-dev", 2, "bf16"), ("wan-2.1-t2v", 1, "bf16"))


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    [
        pytest.param(name, ranks, dtype, marks=() if (name, ranks, dtype) in DEFAULT else pytest.mark.full)
        for name in ("flux-dev", "wan-2.1-t2v")
        for ranks in (1, 2)
        for dtype in ("fp32", "bf16")
    ],
)
def test_a_run_with_graphs_gives_the_same_bits(name, ranks, dtype, pools, file):
    stats = both(pools(ranks), file(name), named(name), Degrees(pipe=ranks), dtype)
    assert all(each.captured and each.replayed for each in stats)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_class_gives_the_same_bits(ranks, pools, tmp_path):
    for found in of_a_class(pools(ranks), ranks, tmp_path / "tiny.safetensors"):
        assert all(captured and replayed for captured, replayed in found)


def test_graphs_end_with_their_run_and_leave_no_memory(pools, file):
    """Runs in turn give the same, and the peak of the later ones is that of the first, but for checksums that are kept."""
    case = named("flux-dev")
    model = load(pools(1), file("flux-dev"), Degrees(), True)
    runs = [sampled(model, case, seeds=(1, 2)) for _ in range(5)]
    assert all(torch.equal(found, runs[0][0]) for found, _ in runs)
    later = [each for _, stats in runs[1:] for each in stats]
    assert len({(each.captured, each.replayed) for each in later}) == 1
    peaks = [each.peak_bytes for each in later]
    assert max(peaks) - min(peaks) <= CHECKSUMS * ALLOCATION


def test_a_lora_ends_the_graphs(pools, file):
    case, path, found = named("flux-dev"), file("flux-dev"), []
    for graphs in (False, True):
        model = load(pools(1), path, Degrees(), graphs)

        def change(number: int, model=model) -> None:
            if number == 4:
                model.adapt(object(), lora(load_file(path)), lambda: None)

        found.append(whole_calls(model, case, change))
        model.adapt(None, (), lambda: None)
    assert torch.equal(*found)
    assert counts(model.close_run(0, lambda: None)) == {(1, 1)}
