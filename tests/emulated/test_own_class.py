"""A class that no family computes on emulated devices: one rank, stages and split batch give what CPU ranks give, and they
what the class gives."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoints.own_class import open_own_class
from parallel_backend.client.call import ModelCall
from parallel_backend.client.loading import load_model
from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.families.own_class.building import build
from parallel_backend.families.own_class.call_arguments import to_tensors
from parallel_backend.families.own_class.trial import trial
from parallel_backend.families.own_class.tried_calls import Call, draw_weights
from tests.campaigns.transport.cases import nothing
from tests.support.cpu_and_gpu import Both
from tests.support.planted_comfyui import planted, planted_comfyui

pytestmark = [pytest.mark.threads, pytest.mark.slow]


@pytest.fixture(autouse=True)
def comfyui():
    with planted_comfyui():
        yield


STAGES = Degrees(), Degrees(pipe=2), Degrees(pipe=3), Degrees(batch=2), Degrees(batch=2, pipe=2)
SEQUENCE = (
    Degrees(ulysses=2),
    Degrees(ulysses=3),
    Degrees(ring=2),
    Degrees(ring=3),
    Degrees(ulysses=2, ring=2),
    Degrees(ulysses=2, pipe=2),
    Degrees(ring=2, batch=2),
)


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("InPlace", STAGES),
        ("Registers", STAGES[2:4]),
        ("Fused", STAGES[2:4]),
        ("PoolsBatch", STAGES[3:]),
        ("Tokens", SEQUENCE),
        ("Crossed", SEQUENCE[:1]),
        ("SharedKeys", SEQUENCE[:1]),
        ("TwoStreams", SEQUENCE[1:5:3]),
        ("PictureFirst", SEQUENCE[:1]),
        ("CountsWordsBetween", SEQUENCE[1:6:2]),
        ("OwnBlocksFirst", (Degrees(pipe=2), Degrees(ulysses=3))),
        ("MasksKeys", SEQUENCE[1:4]),
    ],
)
def test_every_mode(both: Both, tmp_path: Path, name: str, modes: tuple[Degrees, ...]):
    own = planted(name)
    model, g = build(own), torch.Generator().manual_seed(0)
    draw_weights(model, 7)
    save_file(dict(model.state_dict()), path := tmp_path / "own.safetensors")
    named = {"context": torch.randn(2, 5, 16, generator=g), "scale": 3}
    given = Call(torch.randn(2, 4, 2, 4, 6, generator=g), torch.tensor([700.0, 300.0]), named)
    proof = trial(own, given, (900.0, 1.0))
    own = replace(own, blocks=proof.blocks)
    call = ModelCall(
        given.x, given.timestep, to_tensors(named, given.timestep), changes=BlockChanges(one_batch=bool(proof.batch))
    )
    with torch.no_grad():
        whole = given.run(model)

    def on(degrees: Degrees):
        def run(_load: Callable[..., Any], pools: Callable[[int], Any]) -> list[torch.Tensor]:
            pool = pools(degrees.world)
            setup = Setup(path, "fp32", pool.devices, degrees, "sdpa", own_class=own)
            return [load_model(pool, open_own_class(path, own), setup, nothing).predict(call, nothing)]

        return run

    for degrees in modes:
        (found,) = both.check(on(degrees))
        assert (found - whole).abs().max() <= 1e-5 * whole.abs().max(), degrees
