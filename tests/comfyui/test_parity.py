"""Parallel DiT Loader's MODEL gives what ComfyUI's own model gives, in every native sampler."""

import itertools
import re

import pytest

from tests.comfyui.conftest import mostly_full, unselected

pytestmark = pytest.mark.comfyui

LIMIT = 2e-5
"""fp32 rounding, as two attention kernels differ by in a whole run; latents reach about 20."""
ROUNDING = 2.0
"""Or, where that is more, so many times what the native model differs from itself by with another attention kernel. CPUs
differ in that by a factor of two, and the ranks' matrices have other shapes too."""
OTHER_BATCHES = 4e-5
"""Twice that where the ranks also see the batch cut otherwise than the native model: other matrix shapes, other sums."""
MODES = ("ring_degree 2", "tensor_parallel_degree 2", "displaced, all steps warm-up")
SAMPLERS = ("euler", "heun", "dpmpp_2m", "uni_pc", "euler_ancestral", "dpmpp_sde", "lcm")

DEFAULT = tuple((sampler, 3) for sampler in ("heun", "dpmpp_sde"))
"""Beside euler: two calls a step, noise. test_samplers.py has one of each kind against the MODEL itself."""
LATENTS = ("text lengths 9 and 5", "odd size", "seed 2**63", "batch 2", "denoise 0.5")
OF_SD3 = ("SD3", "SD3 odd size", "SD3 ulysses_degree 2", "SD3 all steps warm-up")
DEGREES = ("ulysses_degree 2", "split_batch_degree 2", "one rank")
AS_MODES = tuple(f"{mode} {case}" for mode in MODES for case in ("cfg 3", "cfg 1", "one token", "after one token"))
OF_ONE_TOKEN = tuple(case for case in AS_MODES if "one token" in case and case != f"{MODES[2]} one token")
"""A picture of one token, and an odd one behind it."""
WARM = ("all steps warm-up cfg 3", "all steps warm-up cfg 1")


@pytest.fixture(scope="module")
def parity(request, inside):
    """(results by case, what the process and its ranks printed) of one run for all tests of this file."""
    rows = unselected(request, "sampler", "cfg", of=itertools.product(SAMPLERS, (1, 3)))
    others = unselected(request, "case", of=zip((*LATENTS, *OF_SD3, *AS_MODES, *WARM)))
    return inside.run("parity", skip=[*(row.replace(", ", " cfg ") for row in rows), *others])


def check(found, case, limit, measured):
    assert "error" not in found[case], found[case]
    measured(f"ComfyUI parity, largest difference, {case}", found[case]["difference"])
    if "rounding" in found[case]:
        measured(f"native with another attention kernel, largest difference, {case}", found[case]["rounding"])
    assert found[case]["difference"] <= max(limit, ROUNDING * found[case].get("rounding", 0.0))


@pytest.mark.parametrize(
    ("sampler", "cfg"),
    [
        pytest.param(sampler, cfg, marks=() if sampler == "euler" or (sampler, cfg) in DEFAULT else pytest.mark.full)
        for sampler, cfg in itertools.product(SAMPLERS, (1, 3))
    ],
)
def test_ksampler_equals_the_native_model(parity, measured, sampler, cfg):
    check(parity[0], f"{sampler} cfg {cfg}", LIMIT, measured)


@pytest.mark.parametrize("case", mostly_full(LATENTS, LATENTS[:3]))
def test_other_latents_and_seeds(parity, measured, case):
    check(parity[0], case, LIMIT, measured)


@pytest.mark.parametrize("case", mostly_full(OF_SD3[:3], OF_SD3[:1]))
def test_sd3(parity, measured, case):
    check(parity[0], case, LIMIT, measured)


@pytest.mark.parametrize("case", DEGREES)
def test_other_degrees(parity, measured, case):
    check(parity[0], case, OTHER_BATCHES, measured)


@pytest.mark.parametrize("case", mostly_full(AS_MODES[::4] + AS_MODES[1::4], AS_MODES[::4]))
def test_modes_whose_calls_are_exact(parity, measured, case):
    check(parity[0], case, LIMIT, measured)


def test_stages_cut_by_hand(parity, measured):
    check(parity[0], "stage_split 1,4", LIMIT, measured)


@pytest.mark.parametrize("case", [f"{MODES[2]} one token"])
def test_picture_with_fewer_tokens_than_patches_is_refused(parity, case):
    assert parity[0][case]["error"].startswith("ValueError: patch_degree 2 cuts this picture")


@pytest.mark.parametrize("case", mostly_full(OF_ONE_TOKEN, [case for case in OF_ONE_TOKEN if MODES[0] in case]))
def test_ranks_share_a_picture_of_one_token_and_the_next_one(parity, measured, case):
    check(parity[0], case, LIMIT, measured)


@pytest.mark.full
@pytest.mark.parametrize("case", WARM)
def test_pipefusion_that_only_warms_up_equals_the_plain_model(parity, measured, case):
    check(parity[0], case, 1e-6, measured)


@pytest.mark.full
@pytest.mark.parametrize("case", OF_SD3[3:])
def test_sd3_in_pipefusion_that_only_warms_up_equals_the_plain_model(parity, measured, case):
    """Not bit for bit: the K/V buffers keep the text's keys in front, SD3 itself has them behind; the sums round apart."""
    check(parity[0], case, LIMIT, measured)


def test_ranks_import_the_class_of_comfyui_and_none_of_its_server(parity, comfyui):
    """The ranks of that run printed each module that they imported: Python does so under PYTHONPROFILEIMPORTTIME."""
    imported = set(re.findall(r"^import time:\s*\d+ \|\s*\d+ \|\s*(\S+)$", parity[1], re.MULTILINE))
    assert {"parallel_backend.rank.worker", "comfy.ldm.flux.layers"} <= imported, "the ranks' imports were not printed"
    own = {path.stem for path in comfyui.checkout.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    own |= {path.name for path in comfyui.checkout.iterdir() if path.is_dir()} & {"comfy_extras", "comfy_api", "app"}
    assert {"folder_paths", "nodes", "execution", "server"} <= own
    assert not {name for name in imported if name.split(".")[0] in own - {"comfy"}}
