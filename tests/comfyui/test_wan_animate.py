"""Wan Animate in a real ComfyUI: layers that ComfyUI's process runs for a call, and modules that ranks have in blocks. And
Wan Animate 2: a second stream that not every call has."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.full]

LIMIT = 2e-5
"""Of a difference, as a share of the native latents' largest value."""


@pytest.fixture(scope="module")
def found(inside):
    return inside.run("wan_animate")[0]


@pytest.mark.parametrize("case", ["LoRA, stages", "LoRA, tensor", "fp8", "no faces"])
def test_it_equals_the_native_model(found, case):
    assert found[case].get("share", 1.0) <= LIMIT, found[case]
    assert found[case].get("moved", 1.0) > 1e-3


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("hook", "a LoRA in a conditioning .* for diffusion_model.face_encoder.out_proj.weight"),
        ("skipped blocks", "skipped blocks: between its blocks the class runs modules that are not skipped with them"),
        ("small faces", "positive, negative: the face video is 9 x 8, this model needs 512 x 512"),
    ],
)
def test_what_would_be_wrong_is_refused(found, case, why):
    with pytest.raises(ValueError, match=why):
        raise ValueError(found[case]["error"])


@pytest.fixture(scope="module")
def of_second(inside):
    return inside.run("wan_animate_2")[0]


@pytest.mark.parametrize(
    "case", ["LoRA, stages", "LoRA, tensor", "fp8", "no pose", "a pose in some steps", "the pose alone", "WanAnimate2Cache"]
)
def test_animate_2_equals_the_native_model(of_second, case):
    assert of_second[case].get("share", 1.0) <= LIMIT, of_second[case]
    assert of_second[case].get("moved", 1.0) > 1e-3


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("skipped blocks", "skipped blocks: the pose runs through a block that is skipped for the video"),
        ("other frames", "the pose video, with a frame for the reference image, is made for a latent of 5 x"),
    ],
)
def test_what_would_be_wrong_with_a_pose_is_refused(of_second, case, why):
    with pytest.raises(ValueError, match=why):
        raise ValueError(of_second[case]["error"])
