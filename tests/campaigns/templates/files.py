"""Names of diffusion models in templates -> the test case that is such a model, or what it is where none is."""

import re

CASES = (  # the first pattern that is found in the name
    (r"flux1.*kontext", "flux-kontext"),
    (r"flux1-fill", "flux-fill"),
    (r"flux1-schnell", "flux-schnell"),
    (r"flux1", "flux-dev"),
    (r"flux-2-klein", "flux2-klein"),
    (r"flux2", "flux2-dev"),
    (r"z_image", "z-image"),
    (r"qwen_image_edit|qwen-image-edit|FireRed", "qwen-image-edit"),
    (r"qwen_image", "qwen-image"),
    (r"wan2\.2_i2v", "wan-2.2-i2v"),
    (r"wan2\.2_ti2v", "wan-2.2-5b"),
    (r"wan2\.1_i2v", "wan-2.1-i2v"),
    (r"wan2\.[12]_t2v", "wan-2.1-t2v"),
    (r"Chroma1-HD", "chroma"),
    (r"hunyuan_video_t2v", "hunyuan-video"),
    (r"sd3\.5_large", "sd3.5-large"),
    (r"ltx-video", "ltx-video-0.9.5"),
)


def case_of(name: str) -> str | None:
    """The case that stands for this file."""
    return next((case for pattern, case in CASES if re.search(pattern, name)), None)
OTHERS = (  # what the rest is
    (r"sd_xl|sdxl|v1-5|SD1\.5|512-|dreamshaper|juggernaut|sd_turbo|svd|lotus|unclip|stable_zero", "a UNet of Stable Diffusion's kind"),
    (r"ace_?step|stable_audio|minimax_music|music", "makes sounds, in seconds on one card"),
    (r"hunyuan3d|hunyuan_3d|triposplat|trellis", "makes 3D models, in seconds on one card"),
    (r"sam3|sdpose|rt_?detr", "finds things in pictures"),
    (r"seedvr2", "SeedVR2, for which diffusers has no class"),
    (r"mage_flow", "Mage-Flow, for which diffusers has no class"),
    (r"boogu", "Boogu, for which diffusers has no class"),
    (r"anima", "Anima, of 2 B: little to gain"),
    (r"NewBie", "NewBie, for which diffusers has no class"),
    (r"hidream_o1", "HiDream-O1, which computes on pixels"),
)


def what_it_is(name: str) -> str:
    """Of a file that no case stands for."""
    return next((what for pattern, what in OTHERS if re.search(pattern, name, re.IGNORECASE)), "a model that this version lacks")
