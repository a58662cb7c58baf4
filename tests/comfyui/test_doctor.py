"""Parallel Doctor in a running ComfyUI: its text, and what it leaves behind."""

import copy
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from scripts.comfyui_server import PACK
from tests.comfyui.events import Events

pytestmark = pytest.mark.comfyui

LOADER, PROMPT, LATENT, SAMPLER = "1", "2", "4", "5"
QUICKSTART = json.loads((PACK / "workflows" / "api" / "quickstart.json").read_text())


def sampling(seed: int) -> dict:
    """The bundled workflow, two steps of a small picture, with nothing in it that measured speed decides."""
    prompt = copy.deepcopy(QUICKSTART)
    prompt[LOADER]["inputs"]["stage_split"] = "even"
    prompt[LATENT]["inputs"] |= {"width": 128, "height": 128}
    prompt[SAMPLER]["inputs"] |= {"steps": 2, "seed": seed, "num_pipeline_patch": 2}
    return prompt


def doctor(size: int = 128, **widgets) -> dict:
    """Its loader, prompt and latent, and the doctor instead of the sampler."""
    prompt = {name: copy.deepcopy(QUICKSTART[name]) for name in (LOADER, PROMPT, LATENT)}
    prompt[LATENT]["inputs"] |= {"width": size, "height": size}
    inputs = {"steps": 20, "cfg": 3.0, "text_tokens": 1, "devices": "auto"} | widgets
    links = {"model": [LOADER, 0], "latent_image": [LATENT, 0], "positive": [PROMPT, 0]}
    prompt["20"] = {"class_type": "ParallelDoctor", "inputs": inputs | links}
    return prompt


@pytest.mark.full
def test_it_advises_feeds_another_loader_and_the_next_run_loads_again(server):
    """Before, between and after it, the bundled workflow gives the same picture."""
    configured, asked = sampling(3), doctor()
    asked["40"] = copy.deepcopy(configured[LOADER])
    asked["20"]["inputs"]["model"] = ["40", 0]
    configured[LOADER]["inputs"] |= {"pipefusion_degree": 1, "devices": "auto", "parallel_config": ["20", 1]}
    before = server.run(sampling(1))
    with Events(server.port, "doctor-test") as events:
        prompt_id = server.queue(asked | configured, client_id="doctor-test")
        seen = events.until("execution_success", prompt_id)
    outcome = server.wait(prompt_id)
    assert outcome.status == "success", outcome.error
    assert len(outcome.images) == 1
    (text,) = outcome.outputs["20"]["text"]
    modes = ("pipefusion", "split_batch", "tensor_parallel", "ulysses", "ring", "patch")
    assert all(f"{mode}_degree 2" in text for mode in modes)
    assert "one device (cpu)" in text
    assert "2 in the batch of a model call, 20 steps" in text
    assert "64 image and 4 text tokens" in text
    assert "advice: " in text
    # On a machine that other tests keep busy it may find no gain that is credible, and then advises nothing.
    assert ("Parallel DiT Loader: pipefusion_degree" in text) != ("advice: none, because" in text)
    assert any(kind == "progress" and data["node"] == "20" for kind, data in seen)
    server.run(sampling(2))
    after = server.run(sampling(1) | {"2": {"class_type": "QuickstartPrompt", "inputs": {"text": "3 1 4 1 "}}})
    assert [run.status for run in (before, after)] == ["success", "success"]
    assert np.array_equal(*(np.asarray(Image.open(io.BytesIO(run.images[0]))) for run in (before, after)))


def test_another_gpu_is_predicted(server):
    """A CPU rank has no speed in the table, but the same one again needs none."""
    prompt = doctor(devices="cpu", another_gpu="the same GPU again, PCIe x8")
    outcome = server.run(prompt)
    assert outcome.status == "success", outcome.error
    (text,) = outcome.outputs["20"]["text"]
    today, more = re.split("\n\nwith .*, PCIe x8, predicted: ", text)
    assert "pipefusion_degree 2" not in today
    assert "seconds a step, against one device (cpu), largest memory of a rank:" in more
    assert all(f"{mode}_degree 2" in more for mode in ("pipefusion", "split_batch", "tensor_parallel", "ulysses", "patch"))
    assert "5 % off in the median and 22 % at most" in more
    prompt["20"]["inputs"]["another_gpu"] = "RTX 3090 24 GB, PCIe x8"
    assert "another_gpu: the speed of cpu" in server.run(prompt).error


def test_what_users_do_wrong_is_said(server):
    outcome = server.run(doctor(devices="cuda:7"))
    assert outcome.status == "refused"
    assert "devices: 'cuda:7' is not a device of this machine" in outcome.error
    without_prompt = doctor()
    without_prompt[LOADER]["inputs"]["model_name"] = "tiny.safetensors"
    del without_prompt["20"]["inputs"]["positive"]
    assert "positive: the trial of tiny.safetensors needs a prompt" in server.run(without_prompt).error
