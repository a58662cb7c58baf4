"""The pack in the oldest ComfyUI that it is for: COMFYUI_OLDEST_PATH, or ~/ComfyUI-0.3.64.

That one takes Flux's sizes for given, so no tiny model runs in it natively: here is what needs none. The tests of samplers,
unloading, degrees `auto` and the step cache pass in it too, but for comparisons with a native model (COMFYUI_PATH).
"""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from host_version import OLDEST
from scripts.comfyui_server import PACK, ComfyUIServer
from tests.comfyui.conftest import ranks, ready
from tests.comfyui.graph import small
from tests.comfyui.test_host_names import check_names
from tests.comfyui.websocket import Events
from tests.support.requirements import missing

pytestmark = pytest.mark.comfyui

VERSION = ".".join(map(str, OLDEST))


@pytest.fixture(scope="module")
def oldest_checkout() -> Path:
    checkout = Path(os.environ.get("COMFYUI_OLDEST_PATH") or Path.home() / f"ComfyUI-{VERSION}")
    if not (checkout / "comfyui_version.py").is_file():
        why = f"no ComfyUI {VERSION} at {checkout}; set COMFYUI_OLDEST_PATH to a checkout"
        missing(why, expected=checkout.exists() or "COMFYUI_OLDEST_PATH" in os.environ)
    assert VERSION in (checkout / "comfyui_version.py").read_text()
    return checkout


@pytest.fixture(scope="module")
def oldest(oldest_checkout, tmp_path_factory) -> Iterator[ComfyUIServer]:
    with ComfyUIServer(oldest_checkout, tmp_path_factory.mktemp("oldest"), ready(oldest_checkout).python) as server:
        yield server


def test_every_name_of_it_is_noted_and_has_a_row(oldest_checkout):
    check_names(oldest_checkout)


def test_every_node_is_there(oldest):
    texts = json.loads((PACK / "locales" / "en" / "nodeDefs.json").read_text())
    assert set(texts) <= set(oldest.object_info())


def test_all_ways_to_pipefusion_give_the_same_picture(oldest):
    prompts = [small(name, seed=3, steps=4) for name in ("quickstart", "native_ksampler", "native_ksampler")]
    (apply,) = (node for node in prompts[2].values() if node["class_type"] == "ApplyPipeFusion")
    again = {"model": apply["inputs"]["model"], "gpus": 2, "mode": "pipefusion"}  # a MODEL of ours, the only kind here
    prompts[2]["90"] = {"class_type": "ParallelizeModel", "inputs": again}
    apply["inputs"]["model"] = ["90", 0]
    outcomes = [oldest.run(prompt) for prompt in prompts]
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    first, *others = (np.asarray(Image.open(io.BytesIO(outcome.images[0]))) for outcome in outcomes)
    assert first.std() > 20
    assert all(np.array_equal(first, other) for other in others)


def test_saving_is_refused(oldest):
    """This version copies what its models hold, which is nothing here."""
    (loader,) = (node for node in small("quickstart").values() if node["class_type"] == "ParallelDiTLoader")
    save = {"class_type": "ModelSave", "inputs": {"model": ["1", 0], "filename_prefix": "model"}}
    outcome = oldest.run({"1": loader, "2": save})
    assert "model: saving or extracting weights (asked for by Save Checkpoint or ModelSave" in outcome.error
    assert "Update ComfyUI" in outcome.error


def test_cancel_ends_the_prompt_and_the_next_one_runs(oldest):
    with Events(oldest.port, "oldest") as events:
        prompt_id = oldest.queue(small("quickstart", steps=3000, seed=5), client_id="oldest")
        events.until("progress", prompt_id, where=lambda data: data["max"] == 3000)
        oldest.post("/interrupt", {})
        assert oldest.wait(prompt_id, 60).status == "interrupted"
    after = oldest.run(small("quickstart", seed=6))
    assert after.status == "success", after.error


@pytest.mark.full
def test_killed_rank_is_named_and_the_next_prompt_runs(oldest):
    with Events(oldest.port, "oldest") as events:
        prompt_id = oldest.queue(small("native_ksampler", steps=3000, seed=7), client_id="oldest")
        events.until("progress", prompt_id, where=lambda data: data["max"] == 3000)
        ranks(oldest)[1].kill()
        outcome = oldest.wait(prompt_id, 60)
    assert "rank 1 (cpu) was killed by signal 9" in outcome.error
    after = oldest.run(small("native_ksampler", seed=8))
    assert after.status == "success", after.error


@pytest.mark.full
def test_trace_unload_and_doctor_run(oldest):
    prompt = small("quickstart", seed=9)
    (loader,) = (name for name, node in prompt.items() if node["class_type"] == "ParallelDiTLoader")
    (sampler,) = (name for name, node in prompt.items() if node["class_type"] == "PipeFusionSampler")
    trace = {"after": [sampler, 0], "width": 800, "filename_prefix": "trace"}
    prompt["trace"] = {"class_type": "ParallelTrace", "inputs": trace}
    prompt["unload"] = {"class_type": "UnloadParallelDiT", "inputs": {"anything": ["trace", 0]}}
    outcome = oldest.run(prompt)
    assert outcome.status == "success", outcome.error
    assert len(outcome.images) == 2  # the picture and the timeline

    latent = prompt[sampler]["inputs"]["latent_image"]
    doctor = {"model": [loader, 0], "latent_image": latent, "steps": 4, "cfg": 1.0, "text_tokens": 4, "devices": "auto"}
    kept = {name: prompt[name] for name in (loader, latent[0])}
    outcome = oldest.run(kept | {"doctor": {"class_type": "ParallelDoctor", "inputs": doctor}})
    assert outcome.status == "success", outcome.error
    assert "pipefusion_degree" in outcome.outputs["doctor"]["text"][0]
