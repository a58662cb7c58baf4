"""The client's own tensors are on a card, as ComfyUI's are, and ranks have their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.client.step_cache import StepCache
from parallel_backend.core.degrees import Degrees
from testing import mini
from testing.vaes import OnRanks, made_of, small_vae
from tests.campaigns.transport.cases import CONFIG, Files, nobody
from tests.client.test_step_cache import THRESHOLD, decisions
from tests.rank.test_vae import latent
from tests.support.cpu_and_gpu import Both

pytestmark = pytest.mark.threads


@pytest.mark.parametrize(
    ("degrees", "own"), [(Degrees(pipe=2), 0), pytest.param(Degrees(ulysses=2), 1, marks=pytest.mark.slow)], ids=str
)
def test_the_clients_tensors_are_on_a_card(both: Both, files: Files, degrees, own):
    """As ComfyUI's are: latents and prompts come from there, and results go there. A step cache decides the same by them."""

    def run(load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
        ranks = pool(2)
        model, device = load(files.mini(), degrees), ranks.devices[own]
        x, timestep, tensors = mini.inputs(CONFIG)
        there = x.to(device), timestep.to(device), {key: value.to(device) for key, value in tensors.items()}
        found = [model.predict(ModelCall(*there), nobody)]
        bands = 1 if degrees.displaced else 2
        noise, prompt = there[0], Prompt(there[2], there[2], 1.0)
        found.append(sample_in_bands(model, noise, linear_sigmas(3).to(device), prompt, bands, 1)[0])
        cache = StepCache(THRESHOLD, bands)
        logs.append(decisions(cache))
        found.append(sample_in_bands(model, noise, linear_sigmas(7), prompt, bands, 1, cache=cache)[0])
        decoder = OnRanks(ranks, "vae", lambda: made_of(small_vae()))
        found.append(decoder.run(latent(1, 4, 6, 3).to(device), nobody))
        assert all(each.device.type == torch.device(device).type for each in found[:3])
        return [each.cpu() for each in found]

    logs: list[list[str]] = []
    both.check(run)
    assert logs[0] == logs[1] and {".", "#"} <= {*logs[0]}
