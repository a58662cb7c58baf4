"""A step cache decides and forecasts the same on emulated devices, whole and in bands."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.client.step_cache import StepCache
from parallel_backend.core.degrees import Degrees
from testing import mini
from tests.campaigns.transport.cases import CONFIG, Files, name
from tests.client.test_step_cache import THRESHOLD, decisions
from tests.support.cpu_and_gpu import Both

pytestmark = pytest.mark.threads

STEPS = 7


@pytest.mark.parametrize(
    ("degrees", "bands"),
    [
        pytest.param(Degrees(pipe=2), 2, id="PipeFusion"),
        pytest.param(Degrees(ulysses=2), 0, id=name(Degrees(ulysses=2)), marks=pytest.mark.full),
    ],
)
def test_a_step_cache(both: Both, files: Files, degrees, bands):
    """Answers are the client's own tensors, which may be on a card."""
    noise, _, tensors = mini.inputs(CONFIG, batch=1, height=10, width=8, text=5)
    logs = []

    def run(load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
        device = pool(2).devices[0]
        given = noise.to(device), linear_sigmas(STEPS), Prompt({key: x.to(device) for key, x in tensors.items()}, {}, 1.0)
        cache, model = StepCache(THRESHOLD, max(1, bands)), load(files.mini(), degrees)
        logs.append(decisions(cache))
        if not bands:
            return [sample_whole(model, *given, cache=cache).cpu()]
        return [sample_in_bands(model, *given, bands, 1, cache=cache)[0].cpu()]

    both.check(run)
    assert logs[0] == logs[1]
    assert "." in logs[0] and "#" in logs[0]
