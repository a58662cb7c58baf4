"""SeedVR2: ComfyUI's own node gives its conditioning, from texts that are in the model's file."""

import pytest
from testing.cases import seedvr2
from tests.comfyui.test_families import save_case, skip_without_class

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def found(inside, comfyui, base):
    skip_without_class(comfyui, case := seedvr2.CASES[0])
    save_case(case, base)
    return inside.run("seedvr2", name=case.name)[0] | {"limit": case.native.limit}


def test_videos_are_cut_as_comfyui_cuts_them(found):
    assert found["other windows"] == []


def test_its_node_reads_the_files_texts(found):
    assert found["texts"] == 0


@pytest.mark.parametrize("mode", ["ulysses", "pipefusion"])
def test_samples_equal_the_native_models(found, mode):
    assert found[mode] <= found["limit"]


@pytest.mark.parametrize(
    ("case", "begins", "says"),
    [
        ("no video", "positive, negative: ", "Apply SeedVR2 Conditioning"),
        ("another size", "latent_image: ", "Connect the latent that Apply SeedVR2 Conditioning has"),
    ],
)
def test_what_is_missing_is_named(found, case, begins, says):
    error = found[case]["error"]
    assert error.startswith(f"ValueError: {begins}")
    assert says in error
