"""A rank's micro-step never stops its host: what the device is to do next is there before it has done what it does now.

The ranks compute on emulated devices (tests/support/emulated_gpu), which note what stops the host on CUDA. Its one stop for
an output is on a thread of its own, while the next micro-step is launched.
"""

import pytest

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.fake_cuda import HOPPER
from testing.models import on_ranks
from tests.support.emulated_gpu import emulated
from tests.support.emulated_gpu.machine import Record, machine
from tests.support.emulated_gpu.nccl import gpu_ranks

pytestmark = pytest.mark.threads

MODES = (
    *(Degrees(ring=2), Degrees(ulysses=2), Degrees(tensor=2), Degrees(pipe=2)),
    Degrees(patch=2, patch_mode="displaced"),
)
AROUND = " close_run"
"""The function by which a run's figures are read, after its micro-steps."""


@pytest.fixture
def gpu_pool():
    with emulated(HOPPER, HOPPER), gpu_ranks() as start:
        pool = Pool(("cuda:0", "cuda:1"), start=start, silence=600.0)
        yield pool
        pool.close()


def stops_of_ranks(pool: Pool, checkpoint: Checkpoint, degrees: Degrees, given: tuple) -> list[str]:
    """Of the ranks' main threads in micro-steps of which all but the values is known, each once."""
    x, timestep, tensors = given
    model = on_ranks(pool, checkpoint, degrees, "fp32", "sdpa", lambda: None)

    def run() -> None:
        model.predict(ModelCall(x, timestep, tensors), lambda: None)
        bands = 1 if degrees.displaced else 2
        sample_in_bands(model, x, linear_sigmas(3), Prompt(tensors, tensors, 1.0), bands, 1)

    run()  # what belongs to a prompt, a size or a run is made once
    record: Record = machine.record
    record.stops.clear()
    run()
    assert any(stop.startswith("outputs: ") for stop in record.stops)  # the control: outputs are seen to stop the host
    return sorted({stop for stop in record.stops if stop.startswith("rank") and AROUND not in stop})


@pytest.mark.parametrize(
    "degrees",
    [pytest.param(each, marks=() if each.pipe > 1 or each.patch > 1 else pytest.mark.full) for each in MODES],
    ids=str,
)
def test_no_mode_stops_a_rank(degrees, gpu_pool, mini_file):
    assert stops_of_ranks(gpu_pool, mini.opened(mini_file), degrees, mini.inputs()) == []
