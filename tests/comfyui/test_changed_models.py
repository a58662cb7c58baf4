"""Models whose nodes give more than a prompt (Wan Animate, SeedVR2): calls without some of it give what they do on ComfyUI's
own MODEL."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.full]

LIMIT = 2e-5
"""Of a difference, as a share of the native latents' largest value."""
WITHOUT = (
    *("wan-2.2-animate, no faces", "wan-animate-2, no pose", "wan-animate-2, a pose in some steps"),
    *("wan-animate-2, the pose alone", "wan-animate-2, WanAnimate2Cache", "seedvr2-3b, texts", "seedvr2-7b, two videos"),
)
REFUSED = {
    "wan-2.2-animate, hook": "a LoRA in a conditioning .* for diffusion_model.face_encoder.out_proj.weight",
    "wan-2.2-animate, skipped blocks": "the class has modules between its blocks, which skipping its blocks does not skip",
    "wan-2.2-animate, small faces": "positive, negative: the face video is 9 x 8, this model needs 512 x 512",
    "wan-animate-2, skipped blocks": "skipped blocks: the pose runs through a block that is skipped for the video",
    "wan-animate-2, other frames": "the pose video, with a frame for the reference image, is made for a latent of 5 x",
    "seedvr2-3b, no video": "positive, negative: SeedVR2 needs the video",
}


@pytest.mark.parametrize("case", WITHOUT)
def test_it_equals_the_native_model(found, case):
    assert found[case].get("share", 1.0) <= LIMIT, found[case]


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_result_is_refused(found, case):
    with pytest.raises(ValueError, match=REFUSED[case]):
        raise ValueError(found.error(case))
