"""Unloading gives the ranks' memory back and keeps the ranks; loading says how far it is, and Cancel ends it at once."""

import json
import os
import struct
import threading
from pathlib import Path

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.registry import Registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.own_class.built.building import build
from parallel_backend.quickstart.model import mini_flux
from testing import mini
from testing.host_memory import held_bytes
from testing.models import nobody, whole_call

LARGE = mini.CONFIG | {"double_blocks": 1, "single_blocks": 4, "width": 8 * 128, "axes": (16, 56, 56)}
"""About 400 MB in fp32."""
CHUNK = 1 << 24
COPY, LEFT = 1.1, 0.05
"""Of the weights' bytes: what two ranks hold together when they are loaded, and what may be left once they are unloaded."""
CPUS = ("cpu", "cpu")

pytestmark = pytest.mark.processes


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


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The path of a large model and its bytes."""
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    yield path, write_random(path, LARGE)
    path.unlink()


@pytest.fixture(scope="module")
def registry():
    registry = Registry()
    yield registry
    registry.close()


@pytest.fixture
def key(large):
    return mini.setup(large[0], "fp32", CPUS, Degrees(pipe=2), "sdpa", "even")


@pytest.fixture
def small(mini_file):
    return mini.setup(mini_file, "fp32", CPUS, Degrees(pipe=2), "sdpa", "even")


def test_unloading_gives_the_memory_back_and_keeps_the_ranks(registry, large, key, small):
    given = mini.inputs(LARGE, batch=1, height=48, width=48)
    registry.model(small, nobody).predict(ModelCall(*mini.inputs()), nobody)  # what is imported at first use
    registry.unload()
    pids = registry.model(small, nobody).pool.whole.ranks.pids
    registry.unload()
    before, everything = held_bytes(pids), held_bytes((*pids, os.getpid()))

    model = registry.model(key, nobody)
    assert held_bytes((*pids, os.getpid())) - everything <= COPY * large[1]  # one model between them, and the client none
    first = model.predict(ModelCall(*given), nobody)
    model.post(whole_call(model, *given, model.open_run()))  # buffers of an open run, which unloading has to find
    weights = sum(model.weight_bytes)
    loaded = held_bytes(pids) - before
    assert 0.95 * large[1] < weights <= loaded
    assert registry.models.bytes_on(key, "cpu") == weights
    assert registry.models.bytes_on(key, "cuda:0") == registry.models.bytes_on(small, "cpu") == 0

    registry.unload()
    left = held_bytes(pids) - before
    assert left < LEFT * weights
    assert loaded - left >= (1 - LEFT) * weights
    assert registry.models.bytes_on(key, "cpu") == 0

    again = registry.model(key, nobody)
    assert again.pool.whole.ranks.pids == pids
    assert held_bytes(pids) - before >= 0.95 * weights
    assert again.predict(ModelCall(*given), nobody).equal(first)


def test_loading_says_how_far_it_is_on_the_thread_that_waits(registry, key):
    told = []
    registry.unload()
    registry.model(key, nobody, lambda *said: told.append((*said, threading.get_ident())))
    assert {thread for *_, thread in told} == {threading.get_ident()}
    loading = [fraction for doing, fraction, _ in told if doing == "loading"]
    assert loading == sorted(loading)
    assert any(0 < fraction < 1 for fraction in loading)  # how many are seen depends on how fast the file is read
    assert told[-1][:2] == ("0.5 GB of weights on 2 ranks", 1.0)
