"""NCCL itself between two ranks, on a machine that has one GPU (tests/support/nccl_on_one_card.py)."""

import functools
from collections.abc import Iterator

import pytest
import torch

from parallel_backend.acceptance import checks, machine
from parallel_backend.acceptance.session import SelfTestSession, Settings
from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.models import on_ranks
from tests.support import nccl_on_one_card

DEVICES = ("cuda:0", "cuda:0")
MODES = [
    *(Degrees(**{axis: 2}) for axis in ("ulysses", "ring", "tensor", "pipe", "batch")),
    Degrees(patch=2, patch_mode="displaced"),
    Degrees(patch=2, patch_mode="naive"),
]
STEPS = 5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() != 1, reason="for one CUDA device; two have NCCL without this"),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, Pool]]:
    """Two ranks of the same device by each transport."""
    made = {
        "gloo": Pool(DEVICES),
        "nccl": Pool(DEVICES, start=functools.partial(LocalRanks, entry=nccl_on_one_card.main)),
    }
    for pool in made.values():
        pool.ready.result(timeout=120)
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("degrees", MODES, ids=str)
def test_every_mode_gives_the_bits_of_gloo(pools, mini_file, degrees, dtype):
    """A call and a run, of which the second half is with old keys where the mode has such."""
    x, timestep, tensors = mini.inputs()
    prompt, found = Prompt(tensors, tensors, 1.0), {}
    for name, pool in pools.items():
        model = on_ranks(pool, mini.opened(mini_file), degrees, dtype, "sdpa", lambda: None)
        found[name] = model.predict(ModelCall(x, timestep, tensors), lambda: None)
        if degrees.pipe > 1 or degrees.displaced:
            run = sample_in_bands(model, x, linear_sigmas(STEPS), prompt, degrees.pipe, 2)[0]
            found[name] = torch.stack([found[name], run])
    assert found["nccl"].isfinite().all()
    assert torch.equal(found["nccl"], found["gloo"])


def test_the_self_test_passes(monkeypatch):
    """What it asks of transfers and modes."""

    def session_of(*given) -> SelfTestSession:
        session = SelfTestSession(*given)
        start = functools.partial(LocalRanks, entry=nccl_on_one_card.main)
        monkeypatch.setattr(session._registry, "start_of", lambda devices: start)
        return session

    monkeypatch.setattr(checks, "SelfTestSession", session_of)
    monkeypatch.setattr(machine, "backend_for", nccl_on_one_card.backend_for)
    results = checks.run(Settings(DEVICES), only=("system", "links", "modes"))
    assert {result.name: result.why for result in results if result.status == checks.FAILED} == {}
