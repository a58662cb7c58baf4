"""Nested latents, a video with its sound, under ComfyUI's samplers: on its own model, on ranks, and in bands."""

import pytest

from tests.comfyui.conftest import mostly_full, unselected
from tests.comfyui.samplers import KINDS, OTHERS, selected

pytestmark = pytest.mark.comfyui

NAME = "minimax-h3"
ROUNDING = {"dpmpp_2s_ancestral_cfg_pp": 2e-4}
"""Sampler whose steps make fp32's rounding larger -> limit of both differences.

This one's: the native model with outputs changed at random by 6e-8 of themselves is 3.0e-5 from itself, by 6e-7 2.3e-4, and
with ComfyUI's other attention kernel 6.6e-5. Bands of frames have another order of tokens than a whole call, in which
attention adds up: 1.4e-6 in one call, which this sampler makes 6.8e-5 in four steps, and Euler 1.7e-6.
"""
DEFAULT = ("euler", "dpmpp_sde")
SAMPLERS = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full) for name in (*KINDS, *OTHERS)]
RUNS = (
    *("masks", "guidance of the whole latent", "after the cancellation"),
    "denoise 0.5",
)
WHOLE = {"batch 2": "a patch calls the model in another way", "odd size": "no multiple of the model's patch size"}
"""Runs that are not cut into bands, and why."""
SHAPE = [1, 24, 3, 6, 6]


@pytest.fixture(scope="module")
def found(request, inside, base):
    inside.run("small_files", names=[NAME])
    skip = unselected(request, "run", of=zip((*RUNS, *WHOLE)))
    return inside.run("nested", name=NAME, samplers=selected(request), skip=skip)[0]


def check(got, measured, warm=1e-5, native=5e-5):
    assert "error" not in got, got
    assert got["finite"]
    measured("nested latents, PipeFusion's warm-up", got["warm"])
    assert got["warm"] <= warm
    measured("nested latents, against the native model", got["native"])
    assert got["native"] <= native


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_gives_what_it_gives_on_the_native_model(found, measured, sampler):
    got = found[f"sampler {sampler}"]
    check(got, measured, ROUNDING.get(sampler, 1e-5), ROUNDING.get(sampler, 5e-5))
    assert ["whole latent" in said for said in got["warnings"]] == [True] * (sampler == "dpm_adaptive")
    assert (got["stale"] > 1e-3) == (sampler != "dpm_adaptive")


@pytest.mark.parametrize("run", mostly_full(RUNS, RUNS[:3]))
def test_other_runs(found, measured, run):
    got = found[run]
    check(got, measured)
    assert not got["warnings"]
    assert got["stale"] > 1e-3


@pytest.mark.parametrize("run", mostly_full(WHOLE, [*WHOLE][:1]))
def test_runs_that_are_not_cut_into_bands(found, measured, run):
    check(found[run], measured)
    assert WHOLE[run] in found[run]["warnings"][0]
    assert found[run]["stale"] <= 1e-5


def test_other_schedules_for_video_and_sound(found):
    assert max(found["shifts"].values()) <= 5e-5
    assert found["no shifts"]["native"] > 1e-3


def test_output_heads_of_a_lora_are_chosen(found):
    """In a run of one step, whose head natively has the weights."""
    heads = found["output heads"]
    assert heads["moved"] > 0.1 and heads["native"] <= 5e-5, heads


def test_a_step_cache_forecasts_both(found):
    assert all(1e-6 < moved < 1 for moved in found["step cache"].values())


def test_previews_are_of_the_whole_video(found):
    assert found["previews"] == dict.fromkeys(("native", "plain", "bands"), [SHAPE] * 4)


def test_cancel_ends_a_run_in_bands(found):
    assert found["cancelled"]["steps"] in (2, 3)  # bands look for Cancel between steps


def test_a_video_without_its_sound_is_refused(found):
    assert "does not run with this prompt and latent_image" in found["one latent"]["error"]
    assert "use the Empty Latent node made for this model" in found["one latent"]["error"]


def test_patches(found):
    assert found["displaced, all steps warm-up"]["difference"] <= 1e-4
    naive = found["naive"]
    assert naive["repeat"] == 0.0
    assert 1e-3 < naive["difference"] < 10
