"""The pack in a running ComfyUI, over its HTTP interface: runs, progress, Cancel, failures, and what users do wrong."""

import copy
import importlib
import io
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from scripts.comfyui_server import PACK
from tests.comfyui.conftest import FOLDER, mostly_full
from tests.comfyui.graph import small, workflow
from tests.comfyui.websocket import Events
from tests.support.requirements import missing

pytestmark = pytest.mark.comfyui

LOADER, LATENT, SAMPLER = "1", "4", "5"
"""Ids in quickstart's API form."""
CONFIG = {
    "ulysses_degree": 1,
    "ring_degree": 1,
    "patch_mode": "none",
    "patch_degree": 1,
    "attention": "auto",
    "comm_overlap": True,
}
"""Ulysses Config's inputs as workflows have them that were saved before it got patch_warmup_steps."""
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


def test_only_our_pack_is_loaded(server):
    modules = {node["python_module"] for node in server.object_info().values()}
    assert {name for name in modules if name.startswith("custom_nodes")} == {f"custom_nodes.{FOLDER}"}


def test_quickstart_gives_a_picture_its_report_and_progress(server):
    with Events(server.port, "quickstart-test") as events:
        prompt_id = server.queue(workflow(seed=1), client_id="quickstart-test")
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
    (report,) = (text for shown in outcome.outputs.values() for text in shown.get("text", ()))
    assert "pipefusion_degree 2, 1 model call exact" in report
    assert re.search(r"19 pipelined in [248] bands", report)  # by the block times that the ranks measured


def test_pipefusion_sampler_equals_ksampler_with_apply_pipefusion(server):
    both = [server.run(small(name, seed=3, steps=4)) for name in ("quickstart", "native_ksampler")]
    assert [outcome.status for outcome in both] == ["success", "success"], both
    assert np.array_equal(*(pixels(outcome.images[0]) for outcome in both))


@pytest.mark.alone
@pytest.mark.parametrize(("name", "change"), [("quickstart", copy.copy), ("native_ksampler", displaced)])
def test_cancel_ends_the_prompt_and_the_next_one_runs(server, rank_processes, measured, name, change):
    before = server.run(change(small(name, seed=10)))
    pids = [process.pid for process in rank_processes()]
    with Events(server.port, "cancel-test") as events:
        prompt_id = server.queue(change(workflow(name, steps=3000, seed=11)), client_id="cancel-test")
        events.until("progress", prompt_id, where=lambda data: data["max"] == 3000)
        cancelled = time.monotonic()
        server.post("/interrupt", {})
        outcome = server.wait(prompt_id, 60)
        seconds = time.monotonic() - cancelled
    assert outcome.status == "interrupted"
    measured("seconds from Cancel to the end mid-run", seconds)
    assert seconds < 1.5  # a second and a micro-step, which here takes some hundredths
    assert [process.pid for process in rank_processes()] == pids  # and their weights
    after = server.run(change(small(name, seed=10)))
    assert after.status == "success", after.error
    again = server.run(change(small(name, seed=12)))
    assert again.status == "success", again.error
    assert np.array_equal(pixels(before.images[0]), pixels(after.images[0]))


@pytest.mark.parametrize("name", mostly_full(("quickstart", "native_ksampler"), ["quickstart"]))
def test_killed_rank_is_named_and_the_next_prompt_runs(server, rank_processes, name):
    with Events(server.port, "kill-test") as events:
        prompt_id = server.queue(workflow(name, steps=3000, seed=21), client_id="kill-test")
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
    after = server.run(small(name, seed=22))
    assert after.status == "success", after.error


def test_queued_prompts_of_different_degrees(server):
    """Exact degrees, so that all give the same picture."""
    exact = small("quickstart", seed=31, warmup_steps=1000)
    sequences = ({"ulysses_degree": 2}, DISPLACED)
    sequences = [configured(copy.deepcopy(exact), **widgets) for widgets in sequences]
    tensor = copy.deepcopy(exact)
    tensor[LOADER]["inputs"] |= {"pipefusion_degree": 1, "tensor_parallel_degree": 2}
    one = copy.deepcopy(exact)
    one[LOADER]["inputs"] |= {"pipefusion_degree": 1, "devices": "auto"}
    ids = [server.queue(prompt) for prompt in (exact, *sequences, tensor, one)]
    outcomes = [server.wait(prompt_id) for prompt_id in ids]
    assert {outcome.status for outcome in outcomes} == {"success"}, [outcome.error for outcome in outcomes]
    first, *others = (pixels(outcome.images[0]) for outcome in outcomes)
    assert first.std() > 20
    assert all(np.abs(first - other).max() <= 1 for other in others)


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


TINY = {"model_name": "tiny.safetensors"}
FOUR = {"devices": "cpu,cpu,cpu,cpu"}
WRONG = {
    "too few devices": ({"devices": "cpu"}, ["devices names 1", "pipefusion_degree 2 needs 2"]),
    "absent device": ({"devices": "cpu,cuda:7"}, ["devices: 'cuda:7' is no device of this machine"]),
    "more stages than blocks": (
        {"pipefusion_degree": 6, "devices": "cpu,cpu,cpu,cpu,cpu,cpu"},
        ["pipefusion_degree is 6", "5 transformer blocks"],
    ),
    "devices for tensor parallelism": (
        {"tensor_parallel_degree": 2},
        ["devices names 2", "pipefusion_degree 2 x tensor_parallel_degree 2 needs 4"],
    ),
    "tensor parallelism beyond the heads": (
        FOUR | {"pipefusion_degree": 1, "tensor_parallel_degree": 4},
        ["tensor_parallel_degree: ", "2 heads cannot be shared by 4 ranks"],
    ),
    "truncated file": ({"model_name": "truncated.safetensors"}, ["model_name: truncated.safetensors", "incomplete"]),
    "no transformer": ({"model_name": "vae.safetensors"}, ["model_name: vae.safetensors", "encoder.conv_in.weight"]),
    "another model's prompt": (TINY, ["positive, negative:", "text has width 32: other text encoders"]),
    "words": ({"text": "a cat"}, ["text: at most 4 symbols"]),
}


OF_WIDGETS_ALONE = ("too few devices", "absent device", "devices for tensor parallelism", "words")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_widget_is_named(server, case):
    """Before anything runs if the widgets alone are wrong, and else by the node that reads the file."""
    widgets, said = WRONG[case]
    outcome = server.run(small(**widgets))
    assert [text for text in said if text not in outcome.error] == [], outcome
    assert outcome.status == ("refused" if case in OF_WIDGETS_ALONE else "error")


@pytest.mark.parametrize("route", ["ranks/open", "ranks/close", "plan"])
def test_a_request_that_makes_no_sense_is_refused(server, route):
    """Not an error of the server, such as for a charset that does not exist."""
    url = f"http://127.0.0.1:{server.port}/parallel_dit/{route}"
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json; charset=bogus"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value:
        assert refused.value.code == 400


def test_a_cluster_needs_ray(server):
    has_ray = subprocess.run([server.python, "-c", "import ray"], capture_output=True).returncode == 0
    if has_ray:
        missing("a ComfyUI without the ray package", expected=False)
    outcome = server.run(small(devices="ray:cpu,cpu"))
    assert outcome.status == "refused"
    assert "devices: ray:cpu,cpu needs the ray package: pip install ray" in outcome.error


def test_degrees_auto_is_not_for_a_cluster(server):
    prompt = small(devices="ray:cpu,cpu")
    prompt[LOADER]["inputs"]["degrees"] = "auto"
    outcome = server.run(prompt)
    assert outcome.status == "refused"
    assert "degrees is auto, but what a Ray cluster's machines are is not known" in outcome.error


WRONG_CONFIG = {
    "patches without a mode": ({"patch_degree": 2}, {}, ["patch_degree is 2, but patch_mode is 'none'"]),
    "patches in a pipeline": (
        DISPLACED,
        FOUR | {"pipefusion_degree": 2},
        ["patch_degree is 2 and pipefusion_degree is 2: they do not combine"],
    ),
    "heads that do not divide": (
        {"ulysses_degree": 3},
        {"devices": "cpu,cpu,cpu"},
        ["ulysses_degree is 3, but this model has 2 attention heads"],
    ),
    "more than the heads": ({"ulysses_degree": 4}, FOUR, ["ulysses_degree is 4, but this model has 2 attention heads"]),
    "heads that tensor parallelism has taken": (
        {"ulysses_degree": 2},
        FOUR | {"tensor_parallel_degree": 2},
        ["ulysses_degree is 2", "1 for each of tensor_parallel_degree 2", "Use ulysses_degree <= 1; ring_degree has no"],
    ),
}


@pytest.mark.parametrize("case", mostly_full(WRONG_CONFIG, [case for case in WRONG_CONFIG if case != "more than the heads"]))
def test_wrong_widget_of_the_config_is_named(server, case):
    widgets, loader, said = WRONG_CONFIG[case]
    prompt = configured(small(), **widgets)
    prompt[LOADER]["inputs"] |= loader
    outcome = server.run(prompt)
    refused = case == "patches without a mode"  # the other cases need what both nodes, or the file, say
    assert outcome.status == ("refused" if refused else "error")
    assert refused or outcome.error.startswith(("ParallelDiTLoader: ", "PipeFusionSampler: "))  # heads are known at a call
    assert [text for text in said if text not in outcome.error] == []


@pytest.mark.parametrize("text", ["a", "1", "3,3", "0,5", "-1,6", "2,3,", "2.5,2.5", ""])
def test_stage_split_that_makes_no_sense(server, text):
    prompt = small()
    prompt[LOADER]["inputs"]["stage_split"] = text
    outcome = server.run(prompt)
    sums_up_wrong = text == "3,3"  # which only the file shows
    assert outcome.status == ("error" if sums_up_wrong else "refused")
    assert f"stage_split is '{text}': use auto, even, or 2 numbers of blocks" in outcome.error
    assert f"add up to this model's {'5 ' * sums_up_wrong}blocks" in outcome.error


def with_node(class_type: str, inputs: dict[str, Any], where: str, widget: str) -> dict[str, Any]:
    """quickstart with one more node, whose first output is connected to an input of another node."""
    prompt = small()
    prompt["20"] = {"class_type": class_type, "inputs": inputs}
    prompt[where]["inputs"][widget] = ["20", 0]
    return prompt


def test_latent_of_another_model(server):
    outcome = server.run(with_node("LoadLatent", {"latent": "four-channels.latent"}, SAMPLER, "latent_image"))
    assert outcome.status == "error"
    assert "latent_image" in outcome.error and "The latent has 4 channels: use the Empty Latent node" in outcome.error


@pytest.mark.full
def test_lora_moves_the_picture_until_it_is_removed(server):
    lora = {"model": [LOADER, 0], "lora_name": "tiny-lora.safetensors", "strength_model": 0.02}
    prompts = [small(), with_node("LoraLoaderModelOnly", lora, SAMPLER, "model"), small()]
    outcomes = [server.run(prompt) for prompt in prompts]
    assert [outcome.status for outcome in outcomes] == ["success"] * 3, [outcome.error for outcome in outcomes]
    without, patched, again = (pixels(outcome.images[0]) for outcome in outcomes)
    assert np.abs(patched - without).mean() > 1
    assert np.array_equal(without, again)


def test_lora_of_a_kind_that_does_not_reach_the_ranks_is_refused_and_not_ignored(server):
    lora = {"model": [LOADER, 0], "lora_name": "tiny-enlarging.safetensors", "strength_model": 1.0}
    outcome = server.run(with_node("LoraLoaderModelOnly", lora, SAMPLER, "model"))
    assert outcome.status == "error"
    assert (
        "LoraLoaderModelOnly: model: this LoRA is for another model: its only layer does not fit (double_blocks.0"
        in outcome.error
    )


def test_pipefusion_on_a_native_model(server):
    native = {"unet_name": "tiny.safetensors", "weight_dtype": "default"}
    outcome = server.run(with_node("UNETLoader", native, SAMPLER, "model"))
    assert outcome.status == "error"
    assert "Load it with Parallel DiT Loader" in outcome.error


def test_errors_leave_the_server_working(server):
    outcome = server.run(small(seed=41))
    assert outcome.status == "success", outcome.error


@pytest.fixture
def prompts(tmp_path) -> Path:
    """A folder with a prompt that gives a picture, and one that fails."""
    (tmp_path / "good.json").write_text(json.dumps(small()))
    (tmp_path / "bad.json").write_text(json.dumps(small(devices="cpu")))
    return tmp_path


def test_script_that_runs_a_workflow(server, prompts, monkeypatch, capsys):
    """In this process and with the server that runs already."""
    monkeypatch.syspath_prepend(PACK / "scripts")
    monkeypatch.chdir(prompts)
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
    assert pixels((prompts / "good.png").read_bytes()).shape == (128, 128)
    assert not (prompts / "bad.png").exists()


@pytest.mark.full
def test_script_that_runs_a_workflow_as_it_is_started(comfyui, prompts):
    """From another directory, with a ComfyUI of its own."""
    script = [sys.executable, PACK / "scripts" / "run_comfyui_workflow.py", comfyui.checkout]
    good, bad = (
        subprocess.run(
            [*script, f"{name}.json", "--out", f"{name}.png"], cwd=prompts, capture_output=True, text=True, timeout=300
        )
        for name in ("good", "bad")
    )
    assert good.returncode == 0, good.stderr
    assert "pipefusion_degree 2" in good.stdout
    assert pixels((prompts / "good.png").read_bytes()).shape == (128, 128)
    assert bad.returncode == 1
    assert "devices names 1" in bad.stderr
    assert not (prompts / "bad.png").exists()
