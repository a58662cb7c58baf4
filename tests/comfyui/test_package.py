"""What the registry packs, installed as a user would: copied, under a name of its own, with spaces in the path.

Its ranks are spawned, as users' are; those of the other tests' ComfyUI are forked (see forked_ranks).
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from scripts.comfyui_server import ComfyUIServer
from testing.host_memory import held_bytes
from tests.comfyui.conftest import ranks
from tests.comfyui.test_server import pixels, small, workflow
from tests.comfyui.test_unload import LARGE, prompt, unload, unloading
from tests.comfyui.websocket import Events
from tests.support.package_files import install
from tests.system.test_memory import write_random

pytestmark = pytest.mark.comfyui

FOLDER = "parallel.dit (copy) v2"
LEFT = 0.05
"""Share of the weights' bytes that may be left once they are unloaded."""


@pytest.fixture(scope="module")
def server(comfyui, tmp_path_factory) -> Iterator[ComfyUIServer]:
    base = tmp_path_factory.mktemp("a base") / "with spaces"
    install(base / "custom_nodes" / FOLDER)
    with ComfyUIServer(comfyui.checkout, base, comfyui.python, folder=FOLDER) as server:
        yield server


def test_the_package_runs_from_any_folder(server):
    ours = {name for name, node in server.object_info().items() if node["category"] == "Parallel DiT"}
    outcome = server.run(small(seed=5))
    assert outcome.status == "success", outcome.error
    assert pixels(outcome.images[0]).std() > 0
    assert {"ParallelDiTLoader", "PipeFusionSampler", "ParallelDoctor", "ParallelTrace", "ParallelVAEDecode"} <= ours
    assert not (server.base / "custom_nodes" / FOLDER).is_symlink()
    assert not (server.base / "custom_nodes" / FOLDER / "tests").exists()


@pytest.mark.full
def test_unloading_gives_the_memory_back_and_the_next_prompt_the_same_picture(server, rank_processes, measured):
    name = "large.safetensors"
    size = write_random(server.base / "models" / "diffusion_models" / name, LARGE)

    def ours() -> int:
        return held_bytes(tuple(process.pid for process in rank_processes()))

    def run(which: dict[str, Any]) -> np.ndarray:
        outcome = server.run(which)
        assert outcome.status == "success", outcome.error
        return pixels(outcome.images[0])

    def button() -> None:
        """Sets a flag, at which ComfyUI looks next."""
        server.post("/free", {"unload_models": True, "free_memory": True})
        deadline = time.monotonic() + 60
        while ours() - before >= LEFT * size and time.monotonic() < deadline:
            time.sleep(0.1)

    ways = {
        "button": button,
        "node alone": lambda: unload(server),
        "node behind the sampler": lambda: run(unloading(prompt(name, seed=53))),
    }
    run(small(seed=50))  # what is imported at first use
    ways["node alone"]()
    before, pids = ours(), [process.pid for process in rank_processes()]
    picture = None
    for way, free in ways.items():
        again = run(prompt(name, seed=51))
        picture = again if picture is None else picture
        run(prompt(name, seed=52))  # so that it is not ComfyUI's cache that knows the picture
        assert np.array_equal(picture, again)
        assert ours() - before > 0.95 * size
        free()
        left = ours() - before
        measured(f"memory left on two ranks / their weights, {way}", left / size)
        assert left < LEFT * size
        assert [process.pid for process in rank_processes()] == pids
    assert np.array_equal(run(unloading(prompt(name, seed=51))), picture)
    assert picture.std() > 0


@pytest.mark.full
def test_killed_rank_is_named_and_the_next_prompt_runs(server):
    with Events(server.port, "kill-test") as events:
        prompt_id = server.queue(workflow("native_ksampler", steps=3000, seed=21), client_id="kill-test")
        events.until("progress", prompt_id, where=lambda data: data["max"] == 3000)
        first, second = ranks(server)
        second.kill()
        outcome = server.wait(prompt_id, 60)
    assert outcome.status == "error"
    assert "rank 1 (cpu) was killed by signal 9" in outcome.error
    _, alive = psutil.wait_procs([first, second], timeout=5)
    assert not alive
    after = server.run(small("native_ksampler", seed=22))
    assert after.status == "success", after.error


def test_killed_server_leaves_no_rank(server):
    """SIGKILL: nothing in the server runs any more that could end them, so they notice by themselves."""
    outcome = server.run(small(seed=6))
    assert outcome.status == "success", outcome.error
    left = ranks(server)
    assert len(left) == 2
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
