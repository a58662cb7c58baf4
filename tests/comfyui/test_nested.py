"""Nested latents, a video with its sound, under ComfyUI's samplers: on its own model, on ranks, and in bands."""

import pytest

from .conftest import asked, mostly_full

pytestmark = pytest.mark.comfyui

RUNS = ("euler", "dpmpp_sde", "masks", "guidance of the whole latent")


@pytest.fixture(scope="module")
def found(request, inside):
    return inside.run("nested", skip={*RUNS} - asked(request, "run"))[0]


def check(got):
    assert got["finite"]
    assert got["warm"] <= 1e-5
    assert got["native"] <= 5e-5


@pytest.mark.parametrize("run", mostly_full(RUNS, ("euler", "masks")))
def test_a_run_gives_what_it_gives_on_the_native_model(found, run):
    got = found[run]
    check(got)
    assert not got["warnings"]
    assert got["stale"] > 1e-3


def test_a_batch_is_not_cut_into_bands(found):
    """The native model refuses one: a patch calls it for each video."""
    got = found["batch 2"]
    check(got)
    assert "a patch calls the model differently" in got["warnings"][0]
    assert got["stale"] <= 1e-5


def test_cancel_ends_a_run_in_bands(found):
    assert found["cancelled"]["steps"] in (2, 3)  # bands look for Cancel between steps


def test_a_video_without_its_sound_is_refused(found):
    assert "does not run with this prompt and latent_image" in found.error("one latent")
    assert "use the Empty Latent node made for this model" in found.error("one latent")
