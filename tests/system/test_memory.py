"""Ranks and the client together hold one model, not one each."""

import json
import os
import struct
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.own_class.built.building import build
from parallel_backend.quickstart.model import mini_flux
from parallel_backend.wire.lifecycle import Unload, Unloaded
from testing import mini
from testing.host_memory import held_bytes
from testing.models import on_ranks

CONFIG = mini.CONFIG | {"double_blocks": 4, "single_blocks": 16, "width": 8 * 128, "axes": (16, 56, 56)}
RANKS = 4
COPY, LIMIT = 1.1, 1.3
"""Of the file's size: when it is loaded, and after a call."""
CHUNK = 1 << 24


def write_random(path: Path, config: dict) -> int:
    """A model of this configuration, written piece by piece, so that the test itself never holds it. Its bytes."""
    header, at = {}, 0
    for key, value in build(mini_flux(**config)).state_dict().items():
        header[key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    noise = (torch.randn(CHUNK // 4, generator=torch.Generator().manual_seed(0)) * 0.02).numpy().tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for start in range(0, at, CHUNK):
            file.write(noise[: min(CHUNK, at - start)])
    return at


@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 8e9, reason="needs 8 GB of free memory")
@pytest.mark.parametrize(
    "degrees", [pytest.param(Degrees(pipe=RANKS), marks=pytest.mark.full), Degrees(ulysses=2, tensor=2)], ids=str
)
def test_the_ranks_hold_one_model_between_them(pools, tmp_path, measured, degrees):
    path = tmp_path / "large.safetensors"
    size = write_random(path, CONFIG)
    try:
        assert size > 0.9e9
        pool = pools(RANKS)
        pools.forget(RANKS)
        pool.ask(Unload(), Unloaded).result(timeout=60)
        pids = (*pool.pids, os.getpid())
        checkpoint = mini.opened(path, degrees.tensor)
        before = held_bytes(pids)
        model = on_ranks(pool, checkpoint, degrees, "fp32", "sdpa", lambda: None)
        growth = held_bytes(pids) - before
        measured("memory of all ranks / size of the file", growth / size)
        assert 0.9 * size < growth <= COPY * size
        copies = degrees.batch * degrees.sequence
        assert copies * size <= sum(model.weight_bytes) <= 1.05 * copies * size  # every rank has the small time embedding
        assert max(model.weight_bytes) < 0.55 * size
        given = mini.inputs(CONFIG, batch=1)
        assert model.predict(ModelCall(*given), lambda: None).isfinite().all()
        peak = held_bytes(pids) - before
        assert peak <= LIMIT * size
        pool.ask(Unload(), Unloaded).result(timeout=60)
        left = held_bytes(pids) - before
        measured("memory left after unloading / size of the file", left / size)
        assert left < 0.3 * size  # what the first model made each process import stays; its weights do not
    finally:
        path.unlink()
