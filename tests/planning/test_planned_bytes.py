"""The bytes that the planner expects ranks to send are those that they do, whatever attention a family's blocks have."""

import pytest

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.links import Links
from parallel_backend.planning.calibrated_costs import CalibratedCosts, Calibration
from parallel_backend.planning.machine import Machine
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.workload import workload_of
from testing.cases import all_cases
from testing.models import on_ranks

pytestmark = pytest.mark.threads

TEXT = 8
NO_MACHINE = Calibration(Machine((), Links({})), ())
MODES = {
    "qwen-image-2.1": Degrees(ring=2),
    "wan-animate-2": Degrees(ulysses=2),  # twice as wide between blocks as in its attention
}


@pytest.mark.parametrize("case", [case for case in all_cases() if case.name in MODES], ids=lambda case: case.name)
def test_a_call_sends_what_is_expected(case, pools, tmp_path):
    checkpoint, degrees = open_checkpoint(case.save(case.model(), tmp_path / "model.safetensors")), MODES[case.name]
    what = workload_of(checkpoint, "fp32", "cpu", (1, *case.latent), 1, 4, TEXT)
    by_block = CalibratedCosts(NO_MACHINE, what).sent(Mode(degrees), exact=True)
    pools.forget(2)
    model = on_ranks(pools(2), checkpoint, degrees, "fp32", "sdpa", lambda: None)
    tensors = checkpoint.family.example(TEXT)
    x, *others = checkpoint.family.noise((1, *what.shape[1:]))
    model.predict(ModelCall((x, *others) if others else x, x.new_full((1,), 0.5), tensors), lambda: None)
    stats = model.close_run(0, lambda: None)
    for axis in next(iter(by_block.values())):  # over all ranks: some have a token more
        expected = sum(sum(by_block[block][axis]) for block in what.blocks)
        assert sum(rank.bytes_sent[axis] for rank in stats) == expected
    pools.forget(2)
