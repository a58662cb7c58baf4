"""Expanded weights of packed layers are kept in memory to spare, give the same bits, and go before memory is needed."""

from datetime import timedelta

import pytest
import torch

from parallel_backend.checkpoints.packed_formats import Fp8, GgufBlocks
from parallel_backend.checkpoints.quantised_formats import Quantised
from parallel_backend.rank.stage import expanded_weights
from parallel_backend.rank.worker import Worker
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.rank_settings import RankSettings
from testing import mini
from tests.checkpoints.test_formats import make_gguf
from tests.rank.test_block_probe import PACKABLE
from tests.support.one_rank import OneRank

GB = 1 << 30
PLENTY = 64 * GB


@pytest.fixture
def memory(monkeypatch):
    """`memory(free)`: what the device has free from now on, of 8 GB or more."""

    def free(nbytes: int) -> None:
        monkeypatch.setattr(expanded_weights, "device_memory", lambda _device: (nbytes, max(nbytes, 8 * GB)))

    return free


@pytest.fixture
def expansions(monkeypatch) -> list[int]:
    """An entry for each expansion."""
    made: list[int] = []
    for packing in (Fp8, GgufBlocks, Quantised):

        def noting(self, packed, dtype, expand=packing.expand):
            made.append(1)
            return expand(self, packed, dtype)

        monkeypatch.setattr(packing, "expand", noting)
    return made


@pytest.fixture
def rank(tmp_path):
    make_gguf(tmp_path / "model.gguf", "Q8_0", dict(mini.random_model(PACKABLE).state_dict()))
    rank, (x, _, tensors) = OneRank(tmp_path / "model.gguf"), mini.inputs(PACKABLE)
    for conditioning in (1, 2):
        rank.put(x, tensors, conditioning)
    return rank


def call(rank: OneRank, expansions: list[int], conditioning: int = 1) -> tuple[torch.Tensor, int]:
    """A micro-step's output, and the number of weights that it expanded."""
    x, timestep, _ = mini.inputs(PACKABLE)
    expansions.clear()
    return rank.step(x, timestep, conditioning=conditioning), len(expansions)


def test_a_weight_is_expanded_once_if_there_is_memory(rank, memory, expansions):
    memory(PLENTY)
    first, every = call(rank, expansions)
    layers = len(rank.stage.packed_layers)
    assert every == layers > 20
    assert call(rank, expansions)[1] == layers  # as each is used in a micro-step that was measured before
    again, none = call(rank, expansions)
    assert (none, torch.equal(again, first)) == (0, True)


def test_a_new_form_of_call_is_measured_without_them(rank, memory, expansions):
    memory(PLENTY)
    every, *_ = (call(rank, expansions)[1] for _ in range(3))
    assert call(rank, expansions, conditioning=2)[1] == every
    assert not any(layer.expanded is not None for layer in rank.stage.packed_layers)


def test_memory_to_spare_is_left_to_others(rank, memory, expansions):
    size = max(layer.weight.nbytes for layer in rank.stage.packed_layers)
    memory(GB + 4 * size)  # half of what is beyond 1 GB
    every, _ = (call(rank, expansions)[1] for _ in range(2))
    kept = sum(layer.expanded.nbytes for layer in rank.stage.packed_layers if layer.expanded is not None)
    assert size <= kept <= 2 * size
    memory(GB)
    assert 0 < call(rank, expansions)[1] < every  # none is added


@pytest.mark.parametrize("message", [m.ReadMemory(), m.ReleaseUnused(), m.CloseRun(0), m.SetResident((1,))], ids=str)
def test_they_go_before_memory_is_needed(rank, memory, expansions, monkeypatch, tmp_path, message):
    memory(PLENTY)
    every, *_ = (call(rank, expansions)[1] for _ in range(3))
    settings = RankSettings(("cpu",), 1, timedelta(1), rank=0, rendezvous=tmp_path / "store")
    worker = Worker(settings, None, Heartbeat(), None)
    worker.engines[None] = rank.engine
    monkeypatch.setattr(worker, "_reply", lambda _reply: None)
    worker._handle(message)
    assert not any(layer.expanded is not None for layer in rank.stage.packed_layers)
    assert call(rank, expansions)[1] == every
