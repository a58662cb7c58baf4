"""The pack in a running ComfyUI, over its HTTP interface: runs, progress, Cancel, failures, and what users do wrong."""

import copy
import importlib
import io
import json
import re
import sys
import time
import urllib.error
import urllib.request
from contextlib import nullcontext
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from scripts.comfyui_server import PACK
from tests.comfyui.events import Events
from tests.comfyui.graph import CONFIG, small, workflow

pytestmark = pytest.mark.comfyui

LOADER, LATENT, SAMPLER = "1", "4", "5"
"""Ids in quickstart's API form."""
DISPLACED = {"patch_mode": "displaced", "patch_degree": 2}


def configured(prompt: dict[str, Any], **widgets: Any) -> dict[str, Any]:
    """The prompt with a Ulysses Config instead of a pipeline."""
    prompt["20"] = {"class_type": "UlyssesConfig", "inputs": CONFIG | widgets}
    prompt[LOADER]["inputs"] |= {"pipefusion_degree": 1, "parallel_config": ["20", 0]}
    return prompt


def displaced(prompt: dict[str, Any]) -> dict[str, Any]:
    """native_ksampler with displaced patches and no other node between the loader and KSampler."""
    (sampler,) = (node for node in prompt.values() if node["class_type"] == "KSampler")
    sampler["inputs"]["model"] = [LOADER, 0]
    del prompt["5"]
    return configured(prompt, **DISPLACED)


def pixels(image: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image)).convert("L")).astype(int)


def test_quickstart_gives_a_picture_its_report_and_progress(server):
    with Events(server.port, "quickstart-test") as events:
        prompt_id = server.queue(workflow(seed=1), client_id="quickstart-test", preview_method="latent2rgb")
        seen = events.until("execution_success", prompt_id)
    outcome = server.wait(prompt_id)
    assert outcome.status == "success", outcome.error
    picture = pixels(outcome.images[0])
    assert picture.shape == (256, 256)
    assert picture.std() > 20
    steps = [data["value"] for kind, data in seen if kind == "progress" and (data["node"], data["max"]) == (SAMPLER, 20)]
    assert len(steps) >= 5  # ComfyUI itself leaves out steps that come within 0.1 s of the last one
    assert steps == sorted(set(steps))
    assert steps[-1] == 20
    shapes = {pixels(preview).shape[:2] for preview in events.previews}
    assert shapes and all(height == width for height, width in shapes)  # of the whole latent, not of a band
    (report,) = (text for shown in outcome.outputs.values() for text in shown.get("text", ()))
    assert report.startswith("pipefusion_degree 2\n")
    assert re.search(r"close to exact: [248] patches, warm-up 1", report)  # by the block times that the ranks measured


def test_only_the_page_that_queued_is_told_what_nodes_say(server):
    with Events(server.port, "first-page") as first, Events(server.port, "second-page") as second:
        first_id = server.queue(small(seed=31), client_id="first-page")
        first.until("execution_success", first_id)
        pageless = server.wait(json.loads(server.post("/prompt", {"prompt": small(seed=32)}))["prompt_id"])
        second_id = server.queue(small(seed=33), client_id="second-page")
        second.until("execution_success", second_id)
        last_id = server.queue(small(seed=34), client_id="first-page")
        first.until("execution_success", last_id)
    assert pageless.status == "success", pageless.error
    told = [[text for _, text in page.texts if "close to exact" in text] for page in (first, second)]
    assert [len(texts) for texts in told] == [2, 1]


def test_pipefusion_sampler_equals_ksampler_with_apply_pipefusion(server):
    both = [server.run(small(name, seed=3, steps=4)) for name in ("quickstart", "native_ksampler")]
    assert [outcome.status for outcome in both] == ["success", "success"], both
    assert np.array_equal(*(pixels(outcome.images[0]) for outcome in both))


@pytest.mark.alone
def test_cancel_ends_the_prompt_and_the_next_one_runs(server, rank_processes):
    before = server.run(small(seed=10))
    pids = [process.pid for process in rank_processes()]
    with Events(server.port, "cancel-test") as events:
        prompt_id = server.queue(workflow(steps=3000, seed=11), client_id="cancel-test")
        events.until("progress", prompt_id, where=lambda data: data["max"] == 3000)
        cancelled = time.monotonic()
        server.post("/interrupt", {})
        outcome = server.wait(prompt_id, 60)
        seconds = time.monotonic() - cancelled
    assert outcome.status == "interrupted"
    assert seconds < 1.5  # a second and a micro-step, which here takes some hundredths
    assert [process.pid for process in rank_processes()] == pids  # and their weights
    after = server.run(small(seed=10))
    assert after.status == "success", after.error
    assert np.array_equal(pixels(before.images[0]), pixels(after.images[0]))


def test_killed_rank_is_named_without_keep_run_and_the_next_prompt_runs(server, rank_processes):
    prompt = configured(workflow(steps=3000, seed=21), ulysses_degree=2, keep_run=False)
    with Events(server.port, "kill-test") as events:
        prompt_id = server.queue(prompt, client_id="kill-test")
        events.until("progress", prompt_id, where=lambda data: data["max"] == 3000)
        first, second = rank_processes()
        second.kill()
        outcome = server.wait(prompt_id, 60)
    assert outcome.status == "error"
    assert "rank 1 (cpu) was killed by signal 9" in outcome.error
    logs = server.base / "user" / "parallel_dit" / "logs"
    assert str(logs) in outcome.error
    assert {f"rank-{rank}.log" for rank in range(2)} <= {path.name for path in logs.glob("*/*")}
    _, alive = psutil.wait_procs([first, second], timeout=5)
    assert not alive
    after = server.run(small(seed=22))
    assert after.status == "success", after.error


def test_inputs_that_older_workflows_lack(server):
    old = displaced(small("native_ksampler", seed=35, steps=4))
    old[LOADER]["inputs"].pop("stage_split", None)
    new, warm = copy.deepcopy(old), copy.deepcopy(old)
    new[LOADER]["inputs"]["stage_split"] = "auto"
    new["20"]["inputs"]["patch_warmup_steps"] = 1
    warm["20"]["inputs"]["patch_warmup_steps"] = 4
    outcomes = [server.run(prompt) for prompt in (old, new, warm)]
    assert {outcome.status for outcome in outcomes} == {"success"}, [outcome.error for outcome in outcomes]
    old, new, warm = (pixels(outcome.images[0]) for outcome in outcomes)
    assert np.array_equal(old, new)
    assert not np.array_equal(old, warm)


WRONG = {  # widgets of Ulysses Config, if there is one, and of the loader; the status; what is said of them
    "stages of other blocks": ({}, {"stage_split": "3,3"}, "error", ["stage_split is '3,3'", "this model's 5 blocks"]),
    "too few devices": ({}, {"devices": "cpu"}, "refused", ["devices names 1", "pipefusion_degree 2 needs 2"]),
    "no stages": ({}, {"stage_split": "a"}, "refused", ["stage_split is 'a': use auto, even, or 2 numbers of blocks"]),
    "a cluster": (
        {},
        {"devices": "ray:cpu,cpu", "degrees": "auto"},
        "refused",
        ["it is auto, but the machines of a Ray cluster are unknown"],
    ),
    "patches in a pipeline": (
        DISPLACED,
        {"devices": "cpu,cpu,cpu,cpu", "pipefusion_degree": 2},
        "error",
        ["Set patch_degree or pipefusion_degree to 1: they do not combine", "patch_degree is 2 and pipefusion_degree is 2"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_widget_is_named(server, case):
    config, widgets, status, said = WRONG[case]
    prompt = configured(small(), **config) if config else small()
    prompt[LOADER]["inputs"] |= widgets
    outcome = server.run(prompt)
    assert outcome.status == status
    assert status == "refused" or outcome.error.startswith(("ParallelDiTLoader: ", "PipeFusionSampler: "))
    assert [text for text in said if text not in outcome.error] == [], outcome


@pytest.mark.parametrize("route", ["plan", "move_in"])
def test_a_request_that_makes_no_sense_is_refused(server, route):
    """Not an error of the server, such as for a charset that does not exist."""
    url = f"http://127.0.0.1:{server.port}/parallel_dit/{route}"
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json; charset=bogus"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value:
        assert refused.value.code == 400


@pytest.mark.parametrize(
    ("kind", "inputs", "widget", "said"),
    [
        (
            "LoadLatent",
            {"latent": "four-channels.latent"},
            "latent_image",
            "The latent has 4 channels: use the Empty Latent node",
        ),
        (
            "UNETLoader",
            {"unet_name": "tiny.safetensors", "weight_dtype": "default"},
            "model",
            "Load it with Parallel DiT Loader",
        ),
    ],
)
def test_a_link_from_another_models_node_is_named(server, kind, inputs, widget, said):
    prompt = small()
    prompt["20"] = {"class_type": kind, "inputs": inputs}
    prompt[SAMPLER]["inputs"][widget] = ["20", 0]
    outcome = server.run(prompt)
    assert outcome.status == "error"
    assert widget in outcome.error and said in outcome.error


def test_script_that_runs_a_workflow(server, tmp_path, monkeypatch, capsys):
    """In this process and with the server that runs already. The second prompt fails."""
    (tmp_path / "good.json").write_text(json.dumps(small()))
    (tmp_path / "bad.json").write_text(json.dumps(small(devices="cpu")))
    monkeypatch.syspath_prepend(PACK / "scripts")
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module("run_comfyui_workflow")
    monkeypatch.setattr(script, "ComfyUIServer", lambda *_: nullcontext(server))
    codes = []
    for name in ("good", "bad"):
        monkeypatch.setattr(sys, "argv", ["", str(server.checkout), f"{name}.json", "--out", f"{name}.png"])
        codes.append(script.main())
    assert codes == [0, 1]
    printed = capsys.readouterr()
    assert "pipefusion_degree 2" in printed.out
    assert "devices names 1" in printed.err
    assert pixels((tmp_path / "good.png").read_bytes()).shape == (128, 128)
    assert not (tmp_path / "bad.png").exists()
