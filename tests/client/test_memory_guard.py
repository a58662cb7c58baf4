"""What a run is held to: all that it keeps from call to call, for every conditioning that it has had so far."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.client.call import Conditioning
from parallel_backend.client.memory_guard import MemoryGuard
from parallel_backend.client.placement.memory_model import KV_COPIES
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.families import FAMILIES
from parallel_backend.wire.diagnosis import RankMemory


class Guarded:
    """A guard over one rank, and what it had checked. `asked`: how often the rank was asked for its memory."""

    def __init__(self):
        self.checked, self.asked = [], 0
        check = SimpleNamespace(check=lambda requests, found: self.checked.append(requests))
        self.guard = MemoryGuard(SimpleNamespace(devices=("cpu",), ask=self._ask), check, FAMILIES["flux"])

    def _ask(self, _message, _reply) -> Future:
        self.asked += 1
        future = Future()
        future.set_result([RankMemory(0, "here", 10**9, 10**9, 0, 0)])
        return future


def conditioning(number: int) -> Conditioning:
    return Conditioning(number, (4, 6), TokenOrder(24, 6), 7, 2, {"context": torch.zeros(2, 7, 8)})


@pytest.mark.parametrize(("extrapolate", "kept"), [(True, KV_COPIES), (False, 1)])
def test_a_run_counts_what_it_keeps_of_every_conditioning(extrapolate, kept):
    guarded = Guarded()
    guarded.guard.watch(3, 4, extrapolate, lambda: None)
    for number in (1, 2, 1):
        guarded.guard.check(3, conditioning(number))
    assert [len(requests) for requests in guarded.checked] == [1, 2]
    assert all((request.kept, request.bands) == (kept, 4) for request in guarded.checked[-1])
    assert guarded.asked == 1


def test_an_exact_call_keeps_nothing_and_is_asked_about_once_in_a_run():
    guarded = Guarded()
    for _ in range(2):
        guarded.guard.admit(conditioning(1), lambda: None)
    assert [request.kept for (request,) in guarded.checked] == [0]
    guarded.guard.refresh()
    guarded.guard.admit(conditioning(1), lambda: None)
    assert (len(guarded.checked), guarded.asked) == (2, 2)


def test_a_run_that_is_over_is_not_looked_at():
    guarded = Guarded()
    guarded.guard.watch(3, 4, True, lambda: None)
    guarded.guard.forget(3)
    guarded.guard.check(3, conditioning(1))
    assert not guarded.checked
