"""Many short runs of changing size leave nothing behind, neither in the ranks nor in the client."""

import gc
import os
import random
import threading
from collections.abc import Callable
from contextlib import closing, suppress

import psutil
import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.host_memory import held_bytes
from testing.models import on_ranks

LIMIT = 0.02
"""Growth of a rank's own memory by what its runs keep."""
SETTLED, RUNS = 70, 160
"""Runs after which memory is first looked at: every size has come, and every cache is full; and all of them."""


def nobody() -> None:
    pass


class Cancelled(BaseException):
    pass


def cancelling(after: int) -> Callable[[], None]:
    polls = iter(range(after))

    def poll() -> None:
        if next(polls, None) is None:
            raise Cancelled

    return poll


def one_run(model: RemoteTransformer, chance: random.Random) -> None:
    """A prompt of random size, length, batch and kind; sometimes cancelled, sometimes with a LoRA."""
    size = {"height": 2 * chance.randint(4, 14), "width": 2 * chance.randint(4, 12), "batch": chance.randint(1, 2)}
    x, timestep, tensors = mini.inputs(text=chance.randint(1, 40), seed=chance.randint(0, 10**6), **size)
    model.begin_timeline()
    if chance.random() < 0.2:
        up = torch.randn(128, 2) * chance.random()
        model.adapt(chance.random(), [Delta("img_in.weight", up, torch.randn(2, 64), 1.0)], nobody)
    kind, steps = chance.choice(("calls", "bands", "bands", "cancelled")), chance.randint(2, 4)
    prompt = Prompt(tensors, {}, 1.0)
    if kind == "calls":
        for _ in range(2):
            model.predict(ModelCall(x, timestep, tensors), nobody)
    elif kind == "bands":
        sample_in_bands(model, x, linear_sigmas(steps), prompt, chance.randint(1, 4), 1)
    else:
        with suppress(Cancelled):
            sample_in_bands(model, x, linear_sigmas(50), prompt, 2, 1, cancelling(chance.randint(0, 3)))
    if chance.random() < 0.3:
        model.timeline(nobody)


def books(pids: tuple[int, ...]) -> tuple[int, list[int]]:
    """What the client has: tensors; and threads, and the open files of every process."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return tensors, [threading.active_count(), *(psutil.Process(pid).num_fds() for pid in (os.getpid(), *pids))]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.usefixtures("spawned")
@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(ulysses=2)], ids=str)
def test_memory_is_flat(mini_file, measured, degrees):
    """Of a rank the half of the runs counts in which it grew less. A leak grows in both. The allocator may take 10 MB more
    in one, if a busy machine has more messages wait than ever before."""
    chance, held = random.Random(7), []
    with closing(Pool(("cpu", "cpu"))) as pool:
        model = on_ranks(pool, mini.opened(mini_file), degrees, "fp32", "sdpa", nobody)
        for number in range(RUNS):
            if number in (SETTLED, (SETTLED + RUNS) // 2):
                held.append([held_bytes((pid,)) for pid in pool.pids])
            if number == SETTLED:
                tensors, others = books(pool.pids)
            one_run(model, chance)
        model.predict(ModelCall(*mini.inputs()), nobody)  # what was cancelled is over
        held.append([held_bytes((pid,)) for pid in pool.pids])
        tensors_after, others_after = books(pool.pids)
    for first, middle, last in zip(*held, strict=True):
        grown = 2 * min(middle - first, last - middle) / first
        measured(f"growth of a rank's memory in {RUNS - SETTLED} runs", grown)
        assert grown < LIMIT
    assert tensors_after <= tensors + 20
    assert others_after == others


def test_thirty_cancels_leave_nothing(remote, mini_model):
    """No thread, no open file, and the same output as before."""
    model, given = remote(Degrees(pipe=2), fresh=True), mini.inputs()
    x, _, tensors = given
    prompt = Prompt(tensors, tensors, 1.0)

    def state() -> tuple[list[int], list[int], list[str]]:
        model.predict(ModelCall(*given), nobody)  # what was cancelled is over
        gc.collect()
        processes = [psutil.Process(), *map(psutil.Process, model.pool.pids)]
        names = sorted(thread.name for thread in threading.enumerate())
        return [each.num_fds() for each in processes], [each.num_threads() for each in processes[1:]], names

    def cancelled(number: int) -> None:
        with pytest.raises(Cancelled):
            sample_in_bands(model, x, linear_sigmas(50), prompt, 2, 1, cancelling(number % 5))

    cancelled(0)  # the first one makes what stays
    before = state()
    for number in range(30):
        cancelled(number)
    assert state() == before
    assert mini.relative(model.predict(ModelCall(*given), nobody), mini.reference(mini_model, *given)) <= 1e-5
    assert model.pool.error is None
