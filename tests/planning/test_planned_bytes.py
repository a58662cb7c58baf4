"""The bytes that the planner expects ranks to send are those that they do."""

import pytest

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.links import Links
from parallel_backend.planning.calibrated_costs import CalibratedCosts, Calibration
from parallel_backend.planning.machine import Machine
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.workload import workload_of
from testing import mini

pytestmark = pytest.mark.threads

TEXT = 8
NO_MACHINE = Calibration(Machine((), Links({})), ())


@pytest.mark.parametrize("degrees", [Degrees(ring=2), Degrees(ulysses=2)], ids=str)
def test_a_call_sends_what_is_expected(degrees, remote, mini_file):
    checkpoint = mini.opened(mini_file, text=TEXT)
    what = workload_of(checkpoint, "fp32", "cpu", (1, 16, 16, 12), 1, 4, TEXT)
    sent = CalibratedCosts(NO_MACHINE, what).sent(Mode(degrees), exact=True)
    model = remote(degrees, fresh=True)
    model.predict(ModelCall(*mini.inputs(batch=1, text=TEXT)), lambda: None)
    stats = model.close_run(0, lambda: None)
    for axis in next(iter(sent.values())):  # over all ranks: some have a token more
        expected = sum(sum(sent[block][axis]) for block in (*what.blocks, ""))
        assert sum(rank.bytes_sent[axis] for rank in stats) == expected
