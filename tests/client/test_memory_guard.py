"""What a run is held to: all that it keeps from call to call, for every conditioning that it has had so far.

Weights leave the device for it, and come back.
"""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.client.call import Conditioning, TokenLayout
from parallel_backend.client.memory_guard import MemoryGuard, request_of
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import ALLOWED, Offload
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.own_class.built.built_class import built_class
from parallel_backend.placement.balance import even_stages
from parallel_backend.placement.memory_check import MemoryCheck
from parallel_backend.placement.memory_model import KV_COPIES, USABLE_MEMORY
from parallel_backend.placement.residency import ALL
from parallel_backend.quickstart.model import mini_wan
from parallel_backend.wire import messages as m
from testing import mini
from testing.models import nobody

GB = 10**9


class Guarded:
    """A guard over a rank that has as much memory as `room`, and what it had checked. `asked`: how often the rank was
    asked for its memory. `told`: limits of weights that it was given. `host`: of its memory, see DeviceMemoryReport.
    `working`: what the device says of a micro-step."""

    def __init__(self, path, room: int = 2 * GB, host: str = "", offload: Offload = ALLOWED):
        self.checked, self.asked, self.told, self.room, self.host, self.working = [], 0, [], room, host, 0
        setup, checkpoint = mini.setup(path, "fp32", ("cpu",), Degrees(), "auto", offload=offload), mini.opened(path)
        self.check = MemoryCheck(checkpoint, setup, even_stages(8, 1), 1)
        check, self.check.check = self.check.check, self._checked
        self._check = check
        ranks = SimpleNamespace(devices=("cpu",), ask=self._ask)
        self.guard = MemoryGuard(ranks, self.check, checkpoint.built)
        (self.weights,) = self.check.weights()

    def load(self) -> None:
        self.guard.check_weights((), nobody)
        size = self.weights.on_device(self.guard.resident.limits[0])
        self.guard.resident.loaded([m.Loaded(0, size, (), self.weights.total - size)])

    @property
    def limit(self) -> int:
        return self.guard.resident.limits[0]

    def run(self, rows: int, conditionings: int = 1) -> None:
        """A run in four bands, until its calls."""
        self.guard.refresh()
        self.guard.watch(1, 4, True, nobody)
        for number in range(conditionings):
            self.guard.check(1, conditioning(number, rows))

    def _checked(self, requests, found, resident=None) -> None:
        self.checked.append(requests)
        self._check(requests, found, resident)

    def _ask(self, message, _reply) -> Future:
        future = Future()
        if isinstance(message, m.SetResident):
            self.told.append(message.resident[0])
            size = self.weights.on_device(message.resident[0])
            future.set_result([m.Residency(0, size, self.weights.total - size)])
        else:
            self.asked += 1
            held = self.guard.resident.device_bytes[0]
            report = (0, "here", self.room - held, held, 0, None, self.host, 10 * GB, 25e9, 0, self.working)
            future.set_result([m.DeviceMemoryReport(*report)])
        return future


def conditioning(number: int, rows: int = 4) -> Conditioning:
    return Conditioning(number, TokenLayout((rows, 6)), TokenOrder(6 * rows, 6), 7, 2, mini.inputs()[2])


@pytest.mark.parametrize(("extrapolate", "kept"), [(True, KV_COPIES), (False, 1)])
def test_a_run_counts_what_it_keeps_of_every_conditioning(mini_file, extrapolate, kept):
    guarded = Guarded(mini_file)
    guarded.guard.watch(3, 4, extrapolate, nobody)
    for number in (1, 2, 1):
        guarded.guard.check(3, conditioning(number))
    assert [len(requests) for requests in guarded.checked] == [1, 2]
    assert all((request.kept, request.bands) == (kept, 4) for request in guarded.checked[-1])
    assert guarded.asked == 1


def test_what_a_step_took_is_what_the_next_run_is_expected_to_take(mini_file):
    guarded = Guarded(mini_file)
    few, many = (other.check.memory(other.checked[-1])[0] for other in map(run_of, (mini_file,) * 2, (4, 40)))
    guarded.run(4)
    guarded.guard.forget(1)
    guarded.working = 3 * few.activations
    guarded.run(4)
    expected = guarded.check.memory(guarded.checked[-1])[0]
    assert (expected.activations, expected.least) == (guarded.working, few.least)
    guarded.run(40)
    assert guarded.check.memory(guarded.checked[-1])[0].activations == pytest.approx(3 * many.activations)
    guarded.working = 0  # no step has been computed since
    guarded.run(4)
    assert guarded.check.memory(guarded.checked[-1])[0] == expected


def run_of(path, rows: int) -> Guarded:
    other = Guarded(path)
    other.run(rows)
    return other


# Weights that are streamed.


def run_bytes(guarded: Guarded, rows: int, conditionings: int = 1) -> int:
    other = Guarded(guarded.check.checkpoint.path)
    other.run(rows, conditionings)
    return other.check.memory(other.checked[-1])[0].run


def test_weights_leave_the_device_for_a_run_and_come_back_for_a_smaller_one(mini_file):
    few, many = 4, 400
    guarded = Guarded(mini_file, host="a machine")
    large, weights = run_bytes(guarded, many, 2), guarded.weights
    guarded.room = int((large + weights.least + (weights.total - weights.least) / 2) / USABLE_MEMORY)
    guarded.load()
    assert guarded.limit == ALL  # with no run in view, they fit
    guarded.run(few)
    assert guarded.told == []
    guarded.run(many, 2)
    assert guarded.limit < ALL
    held = guarded.weights.on_device(guarded.limit)
    assert weights.least < held <= USABLE_MEMORY * guarded.room - large  # as many as there is room for, and no more
    assert guarded.weights.streamed(guarded.limit) > 0
    told = len(guarded.told)
    guarded.run(many, 2)
    assert len(guarded.told) == told  # what the last run left room for is not taken for this one's first conditioning
    guarded.run(few)
    guarded.run(few)
    assert guarded.limit == ALL
    assert guarded.guard.resident.wanted == (weights.total,)


def test_only_what_weights_cannot_give_up_is_refused(mini_file):
    rows = 400
    guarded = Guarded(mini_file, host="a machine")
    guarded.load()
    guarded.run(rows)
    (certain,) = (memory.certain for memory in guarded.check.memory(guarded.checked[-1]))
    guarded.room = certain + guarded.weights.least
    guarded.run(rows)
    assert guarded.weights.on_device(guarded.limit) == guarded.weights.least
    guarded.room -= 1
    before = list(guarded.told)
    with pytest.raises(ValueError, match=r"latent_image: this run needs about .* is free with weights streamed"):
        guarded.run(rows)
    assert guarded.told == before


@pytest.mark.parametrize(("host", "offload"), [("", ALLOWED), ("a machine", Offload(streams=False))])
def test_where_nothing_is_streamed_the_same_run_is_refused(mini_file, host, offload):
    guarded = Guarded(mini_file, host=host, offload=offload)
    guarded.load()
    rows = 40
    guarded.room = int((guarded.weights.least + run_bytes(guarded, rows)) / USABLE_MEMORY) + 1
    with pytest.raises(ValueError, match="is free beside") as refused:
        guarded.run(rows)
    assert ("offload auto" in str(refused.value)) == bool(host)
    assert guarded.told == []
    asked: list[int] = []
    guarded.guard.make_room = lambda device, missing: asked.append(missing) or missing
    guarded.run(rows)  # somebody else has made room, of as much as was missing
    assert 0 < asked[0] <= guarded.weights.total


def test_parked_weights_that_have_no_room_are_refused_and_stay_parked(mini_file):
    """They would end the ranks. Models that are used in the same run need not give up what they compute with."""
    guarded = Guarded(mini_file, host="a machine")
    guarded.load()
    guarded.guard.resident.tell((0,))
    guarded.room = guarded.weights.least - 1
    with pytest.raises(ValueError, match=r"^model_name: of the weights of .* at least .* have to be on cpu"):
        guarded.guard.wake(nobody)
    assert guarded.told == [0]


def test_gb_to_leave_free_are_left_free(mini_file):
    guarded = Guarded(mini_file, host="a machine", offload=Offload(leave_free=GB))
    weights = guarded.weights
    guarded.room, asked = GB + weights.least + (weights.total - weights.least) // 2, []
    guarded.guard.make_room = lambda device, missing: asked.append(missing) or 0
    guarded.load()
    wanted = guarded.room - GB + asked[0]
    assert weights.total < wanted < weights.total / USABLE_MEMORY + 2  # others are to leave them free too
    assert weights.least <= weights.on_device(guarded.limit) < guarded.room - GB


@pytest.mark.parametrize(("along", "dim"), [("rows", -2), ("frames", -3)])
def test_a_run_counts_bands_along_the_axis_that_they_cut(along, dim):
    built, grid = built_class(mini_wan()), (6, 4, 4)
    tensors = {"context": torch.zeros(1, 7, 8)}
    given = Conditioning(1, TokenLayout(grid, along), built.token_order(grid, 0, along), 7, 1, tensors)
    assert request_of(given, built).band_dim == dim
