"""Waits taken out of the product, one at a time.

On a real card most of these give the right picture nearly always. Here each is a violation.
"""

import contextlib
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from parallel_backend.core import device_copies as core_copies
from parallel_backend.core import pinned
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.device_copies import to_device
from parallel_backend.rank import outbox
from parallel_backend.rank.micro_step_graphs import CudaCaptures
from parallel_backend.wire.shared_memory import make_segment
from testing.models import whole_call
from tests.campaigns.transport.cases import Files, nothing
from tests.emulated.test_weights import DEEP, GIVEN, PIPE, results
from tests.support.cpu_and_gpu import Both
from tests.support.emulated_gpu.nccl import NcclWork
from tests.support.emulated_gpu.streams import Event

pytestmark = pytest.mark.threads

Run = Callable[[Both, Files], list[torch.Tensor]]


# ---- what is run


def loaded(both: Both, files: Files) -> list[torch.Tensor]:
    """Weights come from a file through pieces of page-locked memory that are filled several times."""
    with mock.patch.object(core_copies, "STAGING_BYTES", 1 << 18):
        return results(both.gpu.load(files.mini(DEEP), Degrees()))


def pipelined(both: Both, files: Files) -> list[torch.Tensor]:
    return results(both.gpu.load(files.mini(), PIPE))


def with_ulysses(both: Both, files: Files) -> list[torch.Tensor]:
    return results(both.gpu.load(files.mini(), Degrees(ulysses=2)))


def borrowed(both: Both, files: Files) -> list[torch.Tensor]:
    """A segment of shared memory that a rank copies from, and then returns."""
    segment = make_segment(1, 1 << 16)
    let_go = pinned.pinning(torch.device("cuda:0"))(segment.memory)
    there = to_device(segment.tensor(torch.float32, [64], 0).fill_(3.0), torch.device("cuda:0"))
    let_go()
    segment.close()
    return [there.cpu()]


def with_graphs(both: Both, files: Files) -> list[torch.Tensor]:
    """Whole calls: the first makes what stays, a later one is captured, and then it is replayed."""
    model = both.gpu.load(files.mini(), Degrees(), cuda_graphs=True)
    found = [whole_call_of(model) for _ in range(5)]
    captured = model.close_run(0, nothing)[0]
    assert captured.captured and captured.replayed
    return found


def whole_call_of(model: Any) -> torch.Tensor:
    call = whole_call(model, *GIVEN)
    model.post(call)
    return model.built.patching.unpack(call.future.result(60), tuple(GIVEN[0].shape))


# ---- what is left out


def nothing_done(*_: Any, **__: Any) -> None:
    pass


def replaced(target: Any, name: str, value: Any) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: mock.patch.object(target, name, value)


class NotWaitedFor(Event):
    synchronize = nothing_done


def events_of(module: Any, kind: type[Event]) -> Callable[[], contextlib.AbstractContextManager]:
    """Events that the module's code makes, and no others, are of this kind."""

    def event(*arguments: Any, **named: Any) -> Event:
        ours = sys._getframe(1).f_code.co_filename == module.__file__
        return (kind if ours else Event)(*arguments, **named)

    return replaced(torch.cuda, "Event", event)


def replayed_elsewhere(captures: CudaCaptures, work: Callable[[], torch.Tensor]) -> Any:
    """Replays are launched on the capture's stream, which waits for nothing."""
    output, replay = CAPTURE(captures, work)

    def replay_there() -> None:
        with torch.cuda.stream(captures._stream):
            replay()

    return output, replay_there


CAPTURE = CudaCaptures.capture


def works_that_stop_the_host_alone(work: NcclWork, timeout: Any = None) -> bool:
    """What has come has come, but nothing on the present stream waits for it: as Work.wait of another stream."""
    return work.work.wait()


def unpinned_at_once(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    cudart = torch.cuda.cudart()
    assert cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1) == 0
    return lambda: cudart.cudaHostUnregister(memory.data_ptr())


@dataclass(frozen=True)
class LeftOut:
    name: str
    run: Run
    change: Callable[[], contextlib.AbstractContextManager]


LEFT_OUT = (
    LeftOut("a piece of a file is filled again too early", loaded, events_of(core_copies, NotWaitedFor)),
    LeftOut("an output is sent before it has come", pipelined, events_of(outbox, NotWaitedFor)),
    LeftOut("heads are not waited for", with_ulysses, replaced(NcclWork, "wait", works_that_stop_the_host_alone)),
    LeftOut("memory is unpinned under copies from it", borrowed, replaced(pinned, "pin", unpinned_at_once)),
    LeftOut("a replay waits for nothing", with_graphs, replaced(CudaCaptures, "capture", replayed_elsewhere)),
)
"""One for each module that waits. Blocks that do not wait for their weights are in test_weights.py."""


@pytest.fixture(scope="module")
def sound(both: Both, files: Files, request) -> Callable[[Run], list[torch.Tensor]]:
    """What a run gives with nothing left out, in which nothing is to be seen: the control. Of runs that a test asks for."""
    asked = {
        item.callspec.params["case"].run
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    # All before the first is left out: what that leaves behind may be freed, and noted, in a later run.
    found = {run: both.on_gpu(lambda *_, run=run: run(both, files)) for run in asked}
    return found.__getitem__


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.run is with_ulysses else pytest.mark.slow) for case in LEFT_OUT],
)
def test_clocks_see_what_is_left_out(both: Both, files: Files, sound, case: LeftOut):
    sound(case.run)
    both.close()
    both.machine.record.forget()
    try:
        with case.change(), contextlib.suppress(Exception):  # such as NotFiniteError, of what has not come yet
            case.run(both, files)
        assert both.machine.record.violations
    finally:
        both.close()
        gc.unfreeze()  # which rank threads freeze at their start
        gc.collect()
        both.machine.record.forget()
