"""Apply PipeFusion under every sampler that ComfyUI has, on the bundled model."""

import pytest

pytestmark = pytest.mark.comfyui

RUNS = (
    *("repeat euler", "repeat dpmpp_sde", "repeat euler_ancestral", "scheduler karras", "denoise 0.5", "batch 2"),
    *("odd size", "inpaint", "guider BasicGuider", "guider CFGGuider", "after the refusals"),
)


@pytest.fixture(scope="module")
def found(comfyui, base):
    return comfyui.run("inside_samplers.py", base)[0]


@pytest.fixture(scope="module")
def samplers(found):
    """Sampler name -> what its runs gave; every sampler of this ComfyUI, none of which failed."""
    samplers = {case.removeprefix("sampler "): got for case, got in found.items() if case.startswith("sampler ")}
    assert len(samplers) >= 39
    failed = {name: got["error"] for name, got in samplers.items() if "error" in got}
    assert not failed
    return samplers


def test_every_sampler_gives_finite_latents(samplers):
    assert not [name for name, got in samplers.items() if not got["finite"]]


def test_every_sampler_but_the_adaptive_one_is_pipelined(samplers):
    said = {name: got["warnings"] for name, got in samplers.items() if got["warnings"]}
    assert said.keys() == {"dpm_adaptive"}
    assert len(said["dpm_adaptive"]) == 1
    assert "whole latent" in said["dpm_adaptive"][0]
    # Stale keys leave a trace: a run without one was not pipelined, whatever was said.
    assert not [name for name, got in samplers.items() if (got["stale"] > 1e-3) == bool(got["warnings"])]


def test_every_sampler_warmed_up_throughout_equals_the_plain_model(samplers, measured):
    for name, got in samplers.items():
        measured("PipeFusion, all steps warm-up, any sampler", got["warm"])
        assert got["warm"] <= 1e-5, name
        assert bool(got["warm warnings"]) == (name == "dpm_adaptive"), name


@pytest.mark.parametrize("case", RUNS)
def test_pipelined_run(found, case):
    got = found[case]
    assert "error" not in got, got
    assert got["finite"]
    assert not got["warnings"]
    assert got["repeat"] == 0.0
    assert got["warm"] <= 1e-5
    assert got["stale"] > 1e-3


def test_random_inpainting_runs_whole_and_says_so(found):
    got = found["inpaint ddim"]
    assert "error" not in got, got
    assert len(got["warnings"]) == 2  # one for each run
    assert "inpaint noise" in got["warnings"][0]
    assert got["stale"] == 0.0


def test_inpainting_keeps_what_is_not_masked(found):
    assert found["inpaint keeps"] <= 1e-5


@pytest.mark.parametrize("case", ["refusal pooled output", "refusal pooled output in bands"])
def test_conditioning_without_pooled_output_is_refused(found, case):
    assert "no pooled output" in found[case]["error"]
    assert found[case]["error"].startswith("ValueError: positive, negative:")
