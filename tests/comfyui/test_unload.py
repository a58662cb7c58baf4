"""Loading and unloading as users meet them: the button, the node, other models that need room, the bar, and Cancel."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from scripts.comfyui_server import ComfyUIServer
from tests.client.test_unload import write_random
from tests.comfyui.events import Events
from tests.comfyui.test_server import LOADER, SAMPLER, pixels, small

pytestmark = pytest.mark.comfyui

LARGE = {"width": 7 * 128, "axes": (16, 56, 56), "double_blocks": 1, "single_blocks": 4}
"""About 300 MB in fp32, for the prompts of the quickstart."""
BAR = 100
"""Steps of the loading bar; no sampler here makes as many."""
UNLOAD = "20"


FREED = ("all", "room for a little more", "the node", "too little in it")
KEPT = ("clone swapped", "room that is there", "room in what allocators keep", "room on another GPU")


@pytest.mark.parametrize("case", FREED)
def test_the_ranks_give_way_and_load_again(found, case):
    got = found[case]
    assert got["before"][0] > 0
    assert got["left"][0] == 0
    assert got["again"] == got["before"][0]
    assert got["pids"] == 2
    assert got["difference"] == 0


@pytest.mark.parametrize("case", KEPT)
def test_the_ranks_keep_their_weights_where_nothing_asks_for_them(found, case):
    got = found[case]
    assert got["before"][0] == got["left"][0] > 0
    assert got["difference"] == 0


def test_a_run_goes_on_though_its_model_is_unloaded_between_steps(found):
    got = found["between steps"]
    assert "error" not in got, got
    assert got["held"] == [0] and got["again"] > 0
    assert got["difference"] == 0


def test_the_ranks_are_asked_for_what_comfyui_lacks(found):
    assert found["given back"][:2] == [500, 500]


@pytest.mark.parametrize("case", ["all", "room for a little more"])
def test_comfyui_takes_an_unloaded_model_off_its_list(found, case):
    assert (found[case]["before"][1], found[case]["left"][1]) == (True, False)


def test_comfyui_sees_what_ranks_hold_on_its_own_gpu(found):
    before, cpu, gpu = (
        found[case] for case in ("before loading", "loaded, on CPU ranks", "loaded, on the GPU that ComfyUI uses")
    )
    own = before["own"]
    assert own < 1e5
    assert before["held"] == before["loaded"] == 0
    held = gpu["held"]
    assert held > 1e6
    assert cpu == {"loaded": own, "size": own, "held": held}
    assert gpu == {"loaded": own + held, "size": own + held, "held": held}
    assert before["size"] == pytest.approx(held, rel=0.1)  # the small time embedding is on every rank


def test_the_node_hands_its_input_through(found):
    assert found["handed through"] is True


def test_a_model_frees_nothing_of_another_one_on_the_same_ranks(found):
    got = found["another model on the ranks"]
    assert min(got["loaded"]) > 1e6
    assert got["kept"]
    assert got["freed"]


def test_a_model_that_nobody_has_any_more_is_still_unloaded(found):
    got = found["dropped"]
    assert got["before"] > 0
    assert got["after"] == 0


@pytest.fixture(scope="module")
def large(base):
    """Name of a model that takes a while to load."""
    path = base / "models" / "diffusion_models" / "large.safetensors"
    write_random(path, LARGE)
    yield path.name
    path.unlink()


def prompt(name: str, **widgets: Any) -> dict[str, Any]:
    """Nothing in it is left to what ranks measure, which may differ from one loading to the next."""
    whole = small(model_name=name, num_pipeline_patch=2, **widgets)
    whole[LOADER]["inputs"]["stage_split"] = "even"
    return whole


def unload(server: ComfyUIServer) -> None:
    """By the node, with nothing before or behind it."""
    outcome = server.run({UNLOAD: {"class_type": "UnloadParallelDiT", "inputs": {}}})
    assert outcome.status == "success", outcome.error


def test_loading_shows_a_bar_and_words_on_the_node_that_waits(server, large):
    unload(server)
    with Events(server.port, "loading-test") as events:
        prompt_id = server.queue(prompt(large, seed=60), client_id="loading-test")
        seen = events.until("execution_success", prompt_id)
    bars = [data for kind, data in seen if kind == "progress" and data["node"] == SAMPLER]
    loading = [data["value"] for data in bars if data["max"] == BAR]
    assert loading == sorted(loading)
    assert len(loading) >= 3
    assert (loading[0], loading[-1]) == (0, BAR)
    assert [data["max"] for data in bars[len(loading) :]] == [2] * (len(bars) - len(loading))  # then the sampler's own
    texts = [text for node, text in events.texts if node == SAMPLER]
    assert any(text.startswith("Parallel DiT: loading, ") for text in texts)
    assert "Parallel DiT: 0.3 GB of weights on 2 ranks" in texts


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-400_000] + bytes(400_000))


@pytest.mark.parametrize("change", ["unloaded", "overwritten"])
def test_a_run_under_way_keeps_the_model_that_it_began_with(server, base, change):
    """Whatever becomes of the file and whoever asks for its memory. The next prompt reads the file anew."""
    path = base / "models" / "diffusion_models" / f"{change}.safetensors"
    write_random(path, LARGE | {"width": 128})
    texts = ("3 1 4 1" + " " * spaces for spaces in range(3))  # the same prompt, by another text to ComfyUI's cache

    def anew() -> np.ndarray:
        outcome = server.run(prompt(path.name, seed=80, steps=40, text=next(texts)))
        assert outcome.status == "success", outcome.error
        return pixels(outcome.images[0])

    expected = anew()
    with Events(server.port, "change-test") as events:
        prompt_id = server.queue(prompt(path.name, seed=80, steps=40, text=next(texts)), client_id="change-test")
        events.until("progress", prompt_id, where=lambda data: data["max"] == 40 and data["value"] >= 2)
        server.post("/free", {"unload_models": True}) if change == "unloaded" else overwrite(path)
        outcome = server.wait(prompt_id)
    assert outcome.status == "success", outcome.error
    assert np.array_equal(pixels(outcome.images[0]), expected)
    assert np.array_equal(anew(), expected) == (change == "unloaded")
    path.unlink()


def cancel_while_it_loads(server, rank_processes, large, ranks: int, least: int):
    """(the ranks, which are stopped; how the prompt ended; seconds from Cancel to that; whether it had loaded by then)."""
    devices = {"pipefusion_degree": ranks, "devices": ",".join(["cpu"] * ranks)}  # 3: others than before, so new ones
    with Events(server.port, "cancel-test") as events:
        prompt_id = server.queue(prompt(large, seed=71, steps=3000, **devices), client_id="cancel-test")
        seen = events.until("progress", prompt_id, where=lambda data: data["max"] == BAR and data["value"] >= least)
        busy = rank_processes()
        for process in busy:
            process.suspend()
        cancelled = time.monotonic()
        server.post("/interrupt", {})
        outcome = server.wait(prompt_id, 60)
        seconds = time.monotonic() - cancelled
        seen += events.until("execution_interrupted", prompt_id)
    loaded = any(kind == "progress" and data["value"] == data["max"] == BAR for kind, data in seen)
    return busy, outcome, seconds, loaded


@pytest.mark.alone
@pytest.mark.parametrize(("phase", "ranks", "least"), [("starting", 3, 0), ("loading", 2, 1)])
def test_cancel_before_the_first_step(server, rank_processes, large, phase, ranks, least):
    """Ranks that are stopped stand for ranks that have much to do and do not listen."""
    expected = server.run(prompt(large, seed=70))
    assert expected.status == "success", expected.error
    for _ in range(5):
        unload(server)
        busy, outcome, seconds, loaded = cancel_while_it_loads(server, rank_processes, large, ranks, least)
        if not loaded:
            break
        for process in busy:  # it was faster than we: the next prompt's ranks are the same
            process.resume()
    assert not loaded
    assert len(busy) == ranks
    assert outcome.status == "interrupted"
    assert seconds < 2.5
    _, alive = psutil.wait_procs(busy, timeout=5)
    assert not alive
    after = server.run(prompt(large, seed=70))
    assert after.status == "success", after.error
    assert np.array_equal(pixels(after.images[0]), pixels(expected.images[0]))
