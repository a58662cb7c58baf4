"""Ranks on one device hand over what is asked of them, and no more. Without ranks: a pool that answers as they do."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.resident_weights import ResidentWeights
from parallel_backend.core.setup import ALLOWED
from parallel_backend.placement.model_sizes import RankWeights
from parallel_backend.wire import messages as m
from testing.models import nobody

DEVICES = ("cuda:0", "cuda:1", "cuda:0")
HELD, BLOCK, KEPT, ADDED = (1000, 1000, 500), 50, 30, 20


class Ranks:
    """Whole blocks of 50 bytes move. Each rank's allocator keeps 30, and adapters take 20."""

    devices = DEVICES

    def __init__(self):
        self.kept, self.asked = [KEPT] * 3, []
        self.weights = ResidentWeights(self, [RankWeights(0, (BLOCK,) * (size // BLOCK)) for size in HELD])
        self.weights.loaded([m.Loaded(rank, size, ()) for rank, size in enumerate(HELD)])
        self.adaptation = SimpleNamespace(bytes=[ADDED] * 3, drop=self._drop)
        memory = SimpleNamespace(in_run=False, has_host=[True] * 3, gave_way=lambda: None, resident=self.weights)
        memory.memory_check = SimpleNamespace(offload=ALLOWED)
        self.posting = SimpleNamespace(busy=False)
        self.model = object.__new__(RemoteTransformer)
        self.model._memory, self.model._posting, self.model._adaptation = memory, self.posting, self.adaptation
        self.model._ranks = self.model.pool = self

    def ask(self, message, _reply) -> Future:
        self.asked.append(type(message).__name__)
        if isinstance(message, m.SetResident):
            kept = map(min, message.resident, HELD)
            answer = [m.Residency(rank, size // BLOCK * BLOCK, 1) for rank, size in enumerate(kept)]
        else:
            answer, self.kept = [m.UnusedReleased(rank, size) for rank, size in enumerate(self.kept)], [0] * 3
        done: Future = Future()
        done.set_result(answer)
        return done

    def _drop(self) -> list[int]:
        self.asked.append("drop")
        freed, self.adaptation.bytes = self.adaptation.bytes, [0] * 3
        return freed

    def give_way(self, nbytes: float) -> int:
        return self.model.give_way("cuda:0", nbytes, nobody)


@pytest.mark.parametrize(
    ("nbytes", "freed", "held", "asked"),
    [
        (60, 60, HELD, ["ReleaseUnused"]),  # what allocators keep is enough
        (61, 60 + 100, (950, 1000, 450), ["ReleaseUnused", "SetResident", "ReleaseUnused"]),  # a block of either
        (360, 60 + 300, (800, 1000, 400), ["ReleaseUnused", "SetResident", "ReleaseUnused"]),  # by what each one has
        (1e32, 60 + 1500 + 40, (0, 1000, 0), ["ReleaseUnused", "drop", "SetResident", "ReleaseUnused"]),
    ],
)
def test_as_much_as_is_asked_goes_and_only_from_that_device(nbytes, freed, held, asked):
    ranks = Ranks()
    assert ranks.give_way(nbytes) == freed
    assert freed >= min(nbytes, sum(HELD[rank] + KEPT + ADDED for rank in (0, 2)))
    assert ranks.weights.device_bytes == held
    assert ranks.asked == asked
    assert ranks.weights.wanted == HELD  # what they are to have again


@pytest.mark.parametrize("busy", [False, True])
def test_what_adapters_add_stays_in_the_middle_of_a_call(busy):
    """Its micro-steps that wait would be computed without."""
    ranks = Ranks()
    ranks.posting.busy = busy
    assert ranks.give_way(1e32) == 60 + 1500 + (-4 * BLOCK if busy else 2 * ADDED)
    assert ("drop" in ranks.asked) is not busy


@pytest.mark.parametrize(
    ("whole", "working", "left"), [(False, False, 0), (False, True, 2 * BLOCK), (True, True, 0)], ids=str
)
def test_a_model_that_is_called_again_in_a_run_keeps_what_it_needs_to_compute(whole, working, left):
    ranks = Ranks()
    assert ranks.weights.give_way([0, 2], 1490, whole, working) == 1500 - 2 * left
    assert ranks.weights.expected() == [left, 1000, left]
    assert ranks.weights.parked == (not left)
