"""Names of diffusion models in templates and in other packs' workflows -> the test case or small model that is such a model,
or what it is."""

import re

CASES = (  # the first pattern that is found in the name, whatever its case
    (r"minimax_h3", "minimax-h3-pruned"),
    (r"fasth3", "minimax-h3-pruned"),
    (r"ltx-2\.5", "ltx-2.5"),
    (r"ltx-2\.3", "ltx-2.3"),
    (r"ltx-2-", "ltx-2"),
    (r"ltx-video-2b-v0\.9\.[5-8]", "ltx-video-0.9.5"),
    (r"ltx-video", "ltx-video-0.9"),
    (r"krea2", "krea2"),
    (r"flux1.*kontext", "flux-kontext"),
    (r"flux\.?1-fill", "flux-fill"),
    (r"flux1-schnell", "flux-schnell"),
    (r"flux1|flux_krea", "flux-dev"),
    (r"flux-2-klein", "flux2-klein"),
    (r"flux_?2|^flux\.safetensors", "flux2-dev"),
    (r"z_image", "z-image"),
    (r"qwen_image_2\.1", "qwen-image-2.1-edit"),
    (r"qwen_image_edit_2511|firered", "qwen-image-edit-2511"),
    (r"qwen_image_edit", "qwen-image-edit"),
    (r"qwen_image_layered", "qwen-image-layered"),
    (r"qwen[_-]image|^qwen\.safetensors", "qwen-image"),
    (r"wan_animate_2", "wan-animate-2"),
    (r"wan2\.1_vace", "wan-vace"),
    (r"bernini_r", "wan-bernini"),
    (r"wan2\.2_s2v", "wan_s2v"),
    (r"scail_2", "scail-2"),
    (r"humo", "wan_humo"),
    (r"wan2\.1_fun_camera", "wan-2.2-camera"),
    (r"wan2\.2_fun_camera", "wan-2.2-camera"),
    (r"wan2\.2_fun_control.*14B", "wan-2.2-fun-control"),
    (r"wan2[._]2[_-]i2v|wan2\.2_fun_inpaint.*14B", "wan-2.2-i2v"),
    (r"wan2\.2_ti2v|wan2\.2_fun_(inpaint|control)_5B", "wan-2.2-5b"),
    (r"wan2\.1_flf2v", "wan-2.1-flf2v"),
    (r"wan2[._]1[_-](i2v|fun_inp|fun_control)|wan21-wanmove|chrono_edit", "wan-2.1-i2v"),
    (r"wan2[._][12][_-]t2v", "wan-2.1-t2v"),
    (r"anima[-_]", "anima"),
    (r"chroma1?-radiance", "chroma_radiance"),
    (r"chroma1-hd|^chroma\.safetensors", "chroma"),
    (r"hunyuanvideo1[._]5|capybara", "hunyuan-video-1.5"),
    (r"hunyuan[_-]video[_-]t2v", "hunyuan-video"),
    (r"mochi_preview", "mochi_preview"),
    (r"kandinsky5lite_t2i", "kandinsky-5-image"),
    (r"kandinsky-?5", "kandinsky-5-video"),
    (r"hidream_e1", "hidream-e1"),
    (r"hidream_i1", "hidream-i1"),
    (r"ideogram4", "ideogram4"),
    (r"ernie", "ernie-image"),
    (r"longcat_image_edit", "longcat-image-edit"),
    (r"longcat_image", "longcat-image"),
    (r"ovis_image", "ovis-image"),
    (r"omnigen2", "omnigen2"),
    (r"netayume", "lumina2"),
    (r"mage_flow", "mage_flow"),
    (r"boogu", "boogu"),
    (r"joyai", "joyimage"),
    (r"lens_", "lens"),
    (r"dancer", "wan_dancer"),
    (r"void_pass", "cogvideox-inpaint"),
    (r"sd3\.5_large", "sd3.5-large"),
    (r"seedvr2_3b", "seedvr2-3b"),
    (r"seedvr2_7b", "seedvr2-7b-sharp"),
)
OTHERS = (  # what the rest is
    (r"sd_xl|sdxl|svd|sd1\.5|juggernaut-xl", "a UNet of Stable Diffusion's kind"),
    (r"ace_?step|stable[-_]audio|minimax_music|yue2", "makes sounds, in seconds on one card"),
    (r"hunyuan_?3d|triposplat|trellis|pixal3d", "makes 3D models, in seconds on one card"),
    (r"hidream_o1|pixeldit", "computes on pixels, without a VAE"),
    (r"flux3", "Flux 3 Klein: not supported yet; its keys are in diffusers' converter"),
    (r"moss_image", "MOSS-Image: no source of it has been found"),
    (r"ming_image|fibo2", "a model to come"),
    (r"newbie|causal_forcing", "no small model here"),
)
HELPERS = (r"sam3|sdpose|rt_?detr|lotus", "finds depth, poses or masks for what the diffusion model is given")


def case_of(name: str) -> str | None:
    """The case that stands for this file."""
    return next((case for pattern, case in CASES if re.search(pattern, name, re.IGNORECASE)), None)


def is_helper(name: str) -> bool:
    """It makes no picture or video of its own."""
    return re.search(HELPERS[0], name, re.IGNORECASE) is not None


def what_it_is(name: str) -> str:
    """Of a file that no case stands for."""
    found = (what for pattern, what in (*OTHERS, HELPERS) if re.search(pattern, name, re.IGNORECASE))
    return next(found, "a model that this version lacks")
