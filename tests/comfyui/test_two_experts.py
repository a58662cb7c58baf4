"""Two MODELs in one graph, as of Wan 2.2: both stay on ranks, and the second prompt reads nothing."""

import pytest

from testing.cases import wan
from tests.comfyui.test_families import save_case

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def found(inside, base):
    case = wan.CASES[0]
    save_case(case, base)
    low = case.model(case.native.config)
    for parameter in low.parameters():
        parameter.data *= 1.1
    case.save(low, base / "models/diffusion_models/low-noise.safetensors", case.native.config)
    return inside.run("two_experts", high=case.name, low="low-noise")[0] | {"limit": case.native.limit}


@pytest.mark.parametrize(("case", "pools"), [("the same degrees", 1), ("other degrees", 1), ("other ranks", 2)])
def test_two_experts_are_read_once_and_give_what_comfyuis_own_give(found, case, pools):
    got = found[case]
    assert "error" not in got, got
    assert got["difference"] <= found["limit"] < found["one for both"]  # the control
    assert (got["loads"], got["pools"]) == ([2, 0, 0], pools)
