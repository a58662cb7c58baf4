"""Samplers that are not ComfyUI's own functions: pipelined where they compute pixel by pixel, else whole with a word."""

import pytest

from tests.comfyui.conftest import mostly_full, unselected

pytestmark = pytest.mark.comfyui

WHOLE = {
    "wrapped dpm_adaptive": "dpm_adaptive sets its step size by the whole latent",
    "wrapped, with noise of its own": "detail_daemon_sampler wraps a sampler with noise of its own",
    "partial": "shifted is not one of ComfyUI's samplers",
    "partial in ComfyUI's name": "shifted is not one of ComfyUI's samplers",
    "object": "Centred is not one of ComfyUI's samplers",
    "wrapped object": "Centred is not one of ComfyUI's samplers",
}


CUT = (
    *("wrapped euler_ancestral", "Euler CFG++, alternative", "partial euler_ancestral"),
    *("wrapped euler", "wrapped dpmpp_2m_sde"),
)


@pytest.fixture(scope="module")
def found(request, inside):
    return inside.run("foreign_samplers", skip=unselected(request, "sampler", of=zip((*CUT, *WHOLE))))[0]


@pytest.mark.parametrize("sampler", mostly_full(CUT, CUT[:3]))
def test_a_sampler_that_computes_pixel_by_pixel_is_pipelined(found, sampler):
    got = found[sampler]
    assert "error" not in got, got
    assert got["reason"] is None
    assert got["warm"] <= 1e-5
    assert got["stale"] > 1e-3  # or it was not cut


@pytest.mark.parametrize(
    "sampler", mostly_full(WHOLE, [name for name in WHOLE if name not in ("partial", "object", "wrapped dpm_adaptive")])
)
def test_another_sampler_runs_whole_and_its_name_is_in_the_report(found, sampler):
    got = found[sampler]
    assert "error" not in got, got
    assert got["reason"] == WHOLE[sampler]
    assert got["warm"] == got["stale"] == 0.0
