"""Two MODELs in one graph, as of Wan 2.2: both stay on ranks, and the second prompt reads nothing."""

import pytest
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfyui
HIGH, LIMIT = "wan-2.1-t2v", 5e-5


@pytest.fixture(scope="module")
def found(inside, base):
    inside.run("small_files", names=[HIGH])
    folder = base / "models/diffusion_models"
    tensors = {key: 1.1 * value for key, value in load_file(folder / f"{HIGH}.safetensors").items()}
    save_file(tensors, folder / "low-noise.safetensors")
    return inside.run("two_experts", high=HIGH, low="low-noise")[0]


@pytest.mark.parametrize(("case", "pools"), [("the same degrees", 1), ("other degrees", 1), ("other ranks", 2)])
def test_two_experts_are_read_once_and_give_what_comfyuis_own_give(found, case, pools):
    got = found[case]
    assert "error" not in got, got
    assert got["difference"] <= LIMIT < found["one for both"]  # the control
    assert (got["loads"], got["pools"]) == ([2, 0, 0], pools)
