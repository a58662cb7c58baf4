"""Apply PipeFusion under ComfyUI's samplers, and displaced and naive patches, on the bundled model."""

import pytest

from .conftest import asked, mostly_full

pytestmark = pytest.mark.comfyui

SAMPLERS = ("euler", "euler_cfg_pp", "euler_ancestral", "heun", "dpmpp_sde", "dpm_adaptive")
"""One that is deterministic, reads the unconditional prediction, adds noise, calls twice a step, draws from a Brownian tree,
computes its step size from the whole latent."""
RUNS = ("euler_ancestral", "odd size", "inpaint", "guider BasicGuider", "after the refusals")
REPORTS = {
    "displaced report": "close to exact: patches, warm-up 1",
    "displaced report, area": "not in patches: the conditioning has its own area",
    "naive report": "naive patches, for comparison",
}
FAR = 0.1
"""How far from exact displaced patches may be, relative to the latent's norm, in 8 steps of the bundled model: a third above
what was measured. At 20 steps Euler is six times closer."""
EXACT = 5e-6
"""Of the latent's norm. An exact call goes through the pipeline one batch entry at a time, through patches as one."""

PATCHES = {  # case -> warnings, and how far from exact it may be
    "displaced euler": (0, 1e-3, FAR),
    "displaced after the refusal": (0, 1e-3, FAR),
    "displaced area": (2, 0.0, EXACT),
    "displaced, all steps warm-up euler": (0, 0.0, EXACT),
    "displaced, all steps warm-up area": (1, 0.0, EXACT),
    # A MODEL with displaced patches brings a wrapper of its own; two of them would run one inside the other.
    "displaced, Apply PipeFusion": (0, 0.0, EXACT),
    "naive euler": (0, 1e-3, 10.0),
}


@pytest.fixture(scope="module")
def found(request, inside):
    return inside.run("samplers", names=sorted({*SAMPLERS} & asked(request, "sampler")))[0]


def check_sampler(found, sampler):
    """Stale keys leave a trace: a run without one was not pipelined, whatever was said."""
    got = found[f"sampler {sampler}"]
    assert got["finite"]
    assert not got["plain warnings"]
    whole = sampler == "dpm_adaptive"
    assert ["whole latent" in said for said in got["warnings"]] == [True] * whole
    assert (got["stale"] > 1e-3) == (not whole)
    assert got["warm"] <= 1e-5
    assert bool(got["warm warnings"]) == whole


@pytest.mark.parametrize("sampler", mostly_full(SAMPLERS, ("euler", "euler_cfg_pp", "dpmpp_sde", "dpm_adaptive")))
def test_a_sampler_is_pipelined_and_warmed_up_gives_what_the_plain_model_gives(found, sampler):
    check_sampler(found, sampler)


@pytest.mark.full
def test_all_samplers_of_this_comfyui(inside):
    found = inside.run("samplers", names=None)[0]
    assert len(found) > 40
    for case in found:
        check_sampler(found, case.removeprefix("sampler "))


@pytest.mark.parametrize("sampler", ["wrapped euler_ancestral", "Euler CFG++, alternative", "partial euler_ancestral"])
def test_a_sampler_that_computes_pixel_by_pixel_is_pipelined(found, sampler):
    got = found[sampler]
    assert got["reason"] is None
    assert got["warm"] <= 1e-5
    assert got["stale"] > 1e-3  # or it was not cut


@pytest.mark.parametrize("case", RUNS)
def test_pipelined_run(found, case):
    got = found[case]
    assert got["finite"]
    assert not got["warnings"]
    assert got["repeat"] == 0.0
    assert got["warm"] <= 1e-5
    assert got["stale"] > 1e-3


def test_random_inpainting_runs_whole_and_says_so(found):
    got = found["inpaint ddim"]
    assert len(got["warnings"]) == 2  # one for each run
    assert "inpaint noise" in got["warnings"][0]
    assert got["stale"] == 0.0


@pytest.mark.parametrize("case", ["refusal text width", "refusal text width in bands", "displaced refusal text width"])
def test_conditioning_of_another_width_is_refused(found, case):
    assert "text has width" in found.error(case)
    assert found.error(case).startswith("ValueError: positive, negative:")


@pytest.mark.parametrize("case", PATCHES)
def test_patches_against_the_exact_run(found, case):
    """A run that cannot be cut says so, once for each run."""
    warnings, least, most = PATCHES[case]
    got = found[case]
    assert got["finite"]
    assert len(got["warnings"]) == warnings
    assert all("exact, and therefore slower, because the conditioning has its own area" in text for text in got["warnings"])
    assert got["repeat"] in (0.0, None)
    assert least <= got["relative"] <= most


@pytest.mark.parametrize("case", REPORTS)
def test_report_of_patches(found, case):
    got = found[case]
    first, *others = got["report"].splitlines()
    assert first == "patch_degree 2" and REPORTS[case] in others
    assert got["difference"] <= 1e-3
    assert ("moved between ranks: nothing" in got["report"]) == (case == "naive report")


def test_naive_patches_are_another_image(found):
    assert found["naive euler"]["relative"] > 2 * found["displaced euler"]["relative"]
