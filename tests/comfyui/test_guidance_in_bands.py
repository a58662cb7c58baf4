"""What is known of nodes' guidance (nodes/sampling/known_local.py): each row is cut and compared with the whole latent."""

import os

import pytest

from testing.comfyui.guidance_names import PACKS_PIXEL_WISE, PACKS_WHOLE, PIXEL_WISE, WHOLE
from tests.comfyui.conftest import mostly_full, unselected
from tests.support.requirements import missing

pytestmark = pytest.mark.comfyui

ON_RANKS = (
    *("Perp-Neg, which calls the model itself", "Skip Layers rescaled, with calls of its own"),
    *("APG under a sampler of two calls a step",),
    *("CFG Override", "APG under a sampler that reads the unconditional prediction"),
    *("Skip Layers, with calls of its own",),
)


@pytest.fixture(scope="module")
def found(request, inside):
    others = unselected(request, "on_ranks", of=zip((*ON_RANKS, *UNKNOWN)))
    return inside.run("guidance_in_bands", packs=None, skip=[f"{name}, on ranks" for name in others])[0]


@pytest.fixture(scope="module")
def of_packs(inside):
    folder = os.environ.get("PARALLEL_DIT_PACKS")
    if folder is None:
        missing("PARALLEL_DIT_PACKS does not name a folder of custom node packs", expected=False)
    return inside.run("guidance_in_bands", packs=folder)[0]


def check_pixel_wise(got):
    assert got.get("moved", 0) > 1e-3, got
    assert not got["unknown"]
    assert got["cut"] == 0


def check_whole(got):
    assert got.get("moved", 0) > 1e-3, got
    assert not got["unknown"]
    assert got["cut"] > 1e-3  # the test would notice
    assert got["exact"] == got["continued"] == 0


@pytest.mark.parametrize("name", PIXEL_WISE)
def test_pixel_wise_guidance_of_bands_is_that_of_the_whole(found, name):
    check_pixel_wise(found[name])


@pytest.mark.parametrize("name", WHOLE)
def test_guidance_of_the_whole_latent_is_the_same_for_bands_at_exact_steps(found, name):
    check_whole(found[name])


@pytest.mark.full
@pytest.mark.parametrize("name", PACKS_PIXEL_WISE)
def test_pixel_wise_guidance_of_packs(of_packs, name):
    check_pixel_wise(of_packs[name])


@pytest.mark.full
@pytest.mark.parametrize("name", PACKS_WHOLE)
def test_guidance_of_packs_that_needs_the_whole_latent(of_packs, name):
    check_whole(of_packs[name])


@pytest.mark.parametrize("on_ranks", mostly_full(ON_RANKS, ON_RANKS[:2]))
def test_guidance_of_a_pipelined_model(found, measured, on_ranks):
    got = found[f"{on_ranks}, on ranks"]
    assert got.get("moved", 0) > 1e-3, got
    assert not got["warnings"]
    assert got["repeat"] == 0
    measured("guidance in bands, all steps warm-up", got["warm"])
    assert got["warm"] <= 1e-5
    assert got["stale"] > 1e-3


UNKNOWN = {
    "unknown": "Centred's sampler_post_cfg_function",
    "unknown operation": "another node's sampler_pre_cfg_function",
}


@pytest.mark.parametrize("on_ranks", mostly_full(UNKNOWN, ["unknown"]))
def test_a_function_that_is_not_known_runs_whole_and_says_so(found, on_ranks):
    got = found[f"{on_ranks}, on ranks"]
    assert f"since {UNKNOWN[on_ranks]} may look at the whole latent" in got["warnings"][0]
    assert got["stale"] == 0
