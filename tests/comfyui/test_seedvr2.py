"""SeedVR2: ComfyUI's own node gives its conditioning, from texts that are in the model's file."""

import pytest

pytestmark = pytest.mark.comfyui
LIMIT = 2e-5
"""Of a difference, as a share of the native latents' largest value."""


@pytest.fixture(scope="module")
def found(inside):
    return inside.run("seedvr2", full=False)[0]


@pytest.fixture(scope="module")
def more(inside):
    return inside.run("seedvr2", full=True)[0]


def test_its_node_reads_the_files_texts(found):
    assert found["texts"] == 0


def test_one_step_equals_the_native_models(found):
    assert found["one step"] <= LIMIT


def test_a_prompt_without_a_video_is_refused(found):
    error = found["no video"]["error"]
    assert error.startswith("ValueError: positive, negative: SeedVR2 needs the video")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["PipeFusion", "batch, ulysses", "batch, split batch"])
def test_samples_equal_the_native_models(more, mode):
    assert more[mode] <= LIMIT


@pytest.mark.full
@pytest.mark.parametrize("case", ["LoRA, stages", "LoRA, tensor", "fp8, stages", "fp8, tensor"])
def test_changed_weights_give_what_they_give_natively(more, case):
    assert more[case].get("share", 1.0) <= LIMIT, more[case]
    assert more[case]["moved"] > 1e-3
