"""Parallel DiT Loader's MODEL gives what ComfyUI's own model gives, in native samplers and each mode."""

import re

import pytest

from tests.comfyui.conftest import asked

pytestmark = pytest.mark.comfyui

LIMIT = 2e-5
"""fp32 rounding, as two attention kernels differ by in a whole run; latents reach about 20."""
ROUNDING = 2.0
"""Or, where that is more, so many times what the native model differs from itself by with another attention kernel. CPUs
differ in that by a factor of two, and the ranks' matrices have other shapes too."""
OTHER_BATCHES = 4e-5
"""Twice that where the ranks also see the batch cut otherwise than the native model: other matrix shapes, other sums."""
CASES = {
    **dict.fromkeys(("euler cfg 1", "dpmpp_sde", "text lengths 9 and 5", "odd size", "seed 2**63", "SD3, odd size"), LIMIT),
    **dict.fromkeys(("ring_degree 2", "ring_degree 2 one token", "ring_degree 2 after one token"), LIMIT),
    "displaced, all steps warm-up": LIMIT,
    "one rank": OTHER_BATCHES,
}
"""Exactness of every mode is held on rank threads (tests/system/test_exactness.py)."""


@pytest.fixture(scope="module")
def parity(request, inside):
    """(results by case, what the process and its ranks printed) of one run for all tests of this file."""
    return inside.run("parity", skip=set(CASES) - asked(request, "case"))


@pytest.mark.parametrize("case", CASES)
def test_ksampler_equals_the_native_model(parity, case):
    found = parity[0][case]
    assert found["difference"] <= max(CASES[case], ROUNDING * found["rounding"])


def test_picture_with_fewer_tokens_than_patches_is_refused(parity):
    assert parity[0].error("displaced one token").startswith("ValueError: patch_degree 2 cuts this image")


def test_ranks_import_the_class_of_comfyui_and_none_of_its_server(parity, comfyui):
    """The ranks of that run printed each module that they imported: Python does so under PYTHONPROFILEIMPORTTIME."""
    imported = set(re.findall(r"^import time:\s*\d+ \|\s*\d+ \|\s*(\S+)$", parity[1], re.MULTILINE))
    assert {"parallel_backend.rank.worker", "comfy.ldm.flux.layers"} <= imported, "the ranks' imports were not printed"
    own = {path.stem for path in comfyui.checkout.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    own |= {path.name for path in comfyui.checkout.iterdir() if path.is_dir()} & {"comfy_extras", "comfy_api", "app"}
    assert {"folder_paths", "nodes", "execution", "server"} <= own
    assert not {name for name in imported if name.split(".")[0] in own - {"comfy"}}
