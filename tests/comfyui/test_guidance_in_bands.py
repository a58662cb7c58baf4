"""What is known of nodes' guidance (nodes/sampling/known_local.py): each row is cut and compared with the whole latent."""

import pytest

from testing.comfyui.guidance_names import PIXEL_WISE, WHOLE

pytestmark = pytest.mark.comfyui


@pytest.mark.parametrize("name", PIXEL_WISE)
def test_pixel_wise_guidance_of_bands_is_that_of_the_whole(found, name):
    got = found[name]
    assert got.get("moved", 0) > 1e-3, got
    assert not got["unknown"]
    assert got["cut"] == 0


@pytest.mark.parametrize("name", WHOLE)
def test_guidance_of_the_whole_latent_is_the_same_for_bands_at_exact_steps(found, name):
    got = found[name]
    assert got.get("moved", 0) > 1e-3, got
    assert not got["unknown"]
    assert got["cut"] > 1e-3  # the test would notice
    assert got["exact"] == got["continued"] == 0


@pytest.mark.parametrize(
    "name", ["Perp-Neg, which calls the model itself", "APG under a sampler that reads the unconditional prediction"]
)
def test_guidance_of_a_pipelined_model(found, name):
    got = found[f"{name}, on ranks"]
    assert got.get("moved", 0) > 1e-3, got
    assert not got["warnings"]
    assert got["repeat"] == 0
    assert got["warm"] <= 1e-5
    assert got["stale"] > 1e-3


def test_a_function_that_is_not_known_runs_whole_and_says_so(found):
    got = found["unknown, on ranks"]
    assert "because Centred's sampler_post_cfg_function may need the whole latent" in got["warnings"][0]
    assert got["stale"] == 0
