"""Parallel Step Cache under ComfyUI's samplers, whole and in bands, and what it says on the sampler's node."""

import pytest
from safetensors.torch import load_file

from tests.comfyui.graph import PIPELINED, PLAIN, Graph, copy_of_bundled
from tests.comfyui.websocket import Events

pytestmark = pytest.mark.comfyui

STEPS = 12


@pytest.mark.parametrize("case", ["euler", "bands", "displaced"])
def test_some_calls_are_forecast_and_the_run_repeats(found, case):
    """The second run comes after another prompt's: nothing of either is left."""
    got = found[case]
    assert got["uncached decisions"] == ""
    assert len(got["decisions"]) == STEPS
    assert got["decisions"].startswith("###")
    assert got["decisions"].endswith("#")
    assert got["decisions"].count(".") >= 3
    assert got["same decisions"]
    assert got["repeat"] == 0.0
    assert 1e-5 < got["relative"] < 0.2  # at 12 steps; and displaced keys are two steps old where a call was forecast


def test_a_run_that_cannot_be_cut_has_a_cache_for_whole_calls(found):
    assert "." in found["adaptive in bands"]["decisions"]


def test_calls_outside_the_percents_are_computed(found):
    decisions = found["percents"]["decisions"]
    assert "." in decisions
    assert decisions.startswith("####")
    assert decisions.endswith("###")


def test_threshold_0_takes_the_cache_away(found):
    assert found["off"] == {"difference": 0.0, "decisions": ""}


def test_pipefusion_samplers_report(found):
    got = found["report"]
    assert got["difference"] == 0.0
    computed = got["decisions"].count("#")
    assert computed < STEPS
    assert got["report"].splitlines()[0].endswith(f", step cache: {computed} of {STEPS} model calls computed")


def test_it_is_said_on_the_samplers_node(server, base):
    graph = Graph()
    with copy_of_bundled(base):
        kinds = graph.models()
        settings = {"threshold": 0.2, "start_percent": 0.0, "end_percent": 1.0}
        found = {
            kind: graph.ksampler(graph.add("ParallelStepCache", model=kinds[kind], **settings), steps=STEPS)
            for kind in (PLAIN, PIPELINED)
        }
        pipefusion = {"num_pipeline_patch": 3, "warmup_steps": 1, "overlap": True, "step_cache": 0.2}
        found["sampler"] = graph.ksampler(kinds[PLAIN], None, "PipeFusionSampler", steps=STEPS, **pipefusion)
        saved = {kind: graph.add("SaveLatent", samples=latent, filename_prefix="cache") for kind, latent in found.items()}
        with Events(server.port, "cache") as events:
            prompt_id = server.queue(graph.prompt, client_id="cache")
            events.until("execution_success", prompt_id, 300)
            said = {kind: [text for node, text in events.texts if node == link[0]][-1] for kind, link in found.items()}
        outcome = server.wait(prompt_id)
    assert outcome.status == "success", outcome.error
    files = {kind: outcome.outputs[link[0]]["latents"][0]["filename"] for kind, link in saved.items()}
    latents = {kind: load_file(base / "output" / name)["latent_tensor"] for kind, name in files.items()}
    assert (latents[PIPELINED] - latents["sampler"]).abs().max() == 0
    assert (latents[PLAIN] - latents["sampler"]).abs().max() > 1e-4
    assert said[PLAIN].splitlines()[1] == "close to exact: step cache"
    assert "close to exact: 3 patches" in said[PIPELINED]
    for text in said.values():
        computed, calls = map(int, text.split("step cache: ")[1].split(" model calls")[0].split(" of "))
        assert STEPS // 2 <= computed < calls == STEPS
