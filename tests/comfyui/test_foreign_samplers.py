"""Samplers that are not ComfyUI's own functions: pipelined where they compute pixel by pixel, else whole with a word."""

import pytest

pytestmark = pytest.mark.comfyui

WHOLE = {
    "wrapped, with noise of its own": "detail_daemon_sampler wraps a sampler that has its own noise",
    "partial in ComfyUI's name": "shifted is not one of ComfyUI's samplers",
    "wrapped object": "Centred is not one of ComfyUI's samplers",
}


@pytest.mark.parametrize("sampler", ["wrapped euler_ancestral", "Euler CFG++, alternative", "partial euler_ancestral"])
def test_a_sampler_that_computes_pixel_by_pixel_is_pipelined(found, sampler):
    got = found[sampler]
    assert got["reason"] is None
    assert got["warm"] <= 1e-5
    assert got["stale"] > 1e-3  # or it was not cut


@pytest.mark.parametrize("sampler", WHOLE)
def test_another_sampler_runs_whole_and_its_name_is_in_the_report(found, sampler):
    got = found[sampler]
    assert got["reason"] == WHOLE[sampler]
    assert got["warm"] == got["stale"] == 0.0
