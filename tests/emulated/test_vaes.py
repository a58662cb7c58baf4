"""A VAE in bands, and in tiles, on emulated devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from testing.vaes import OnRanks, made_of, small_vae
from tests.campaigns.transport.cases import nothing
from tests.support.cpu_and_gpu import Both

pytestmark = pytest.mark.threads


def bands(_load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
    generator, vae, found = torch.Generator().manual_seed(1), small_vae(), []
    for part, shape in {"decoder": (2, 4, 7, 3), "encoder": (1, 3, 24, 12)}.items():
        x, ranks = (
            torch.randn(shape, generator=generator),
            OnRanks(pool(2), part, lambda part=part: made_of(vae, part), part),
        )
        found += [ranks.run(x, nothing), ranks.run(x * 2, nothing)]
    return found


def tiles(_load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
    x, vae = torch.randn((3, 4, 4, 4), generator=torch.Generator().manual_seed(1)), small_vae()
    return [*OnRanks(pool(2), "tiles", lambda: made_of(vae)).remote.run_tiles([x, x * 2], nothing)]


@pytest.mark.parametrize("run", [bands, tiles])
def test_cards_compute_what_cpu_ranks_do(both: Both, run):
    assert all(each.std() > 1e-3 for each in both.check(run))
