"""Every class of models that ComfyUI has is computed by a family, or refused by the loader before anything is started."""

import pytest

from parallel_backend.families import FAMILIES
from testing.cases import all_cases

pytestmark = pytest.mark.comfyui

NAMED = {  # what a refusal says of a model -> the classes of which it says so; none of ours computes them
    "a UNet, and": (
        *("LotusD", "Stable_Zero123", "SD15_instructpix2pix", "SD15", "SD20", "SD21UnclipL", "SD21UnclipH", "SSD1B"),
        *("SDXL_instructpix2pix", "SDXLRefiner", "SDXL", "KOALA_700M", "KOALA_1B", "Segmind_Vega", "SD_X4Upscaler"),
        *("Stable_Cascade_C", "Stable_Cascade_B", "SV3D_u", "SV3D_p", "SVD_img2vid"),
    ),
    "a model of sound": ("StableAudio3", "StableAudio", "ACEStep", "ACEStep15", "MiniMaxMusic3"),
    "a model of 3D shapes": ("Hunyuan3Dv2mini", "Hunyuan3Dv2", "Hunyuan3Dv2_1", "TripoSplat", "Trellis2"),
    "no model that a sampler runs": ("RT_DETR_v4", "SAM3", "SAM31", "DepthAnything3"),
    "AuraFlow": ("AuraFlow",),
    # Files of these classes are opened for ComfyUI's own class, and the ones here are of other sizes than detection takes.
    "lacks extra_pos_embedder": ("CosmosT2V", "CosmosI2V"),
    "lacks layers.26": ("Omnigen2",),
    "Z-Image in pixel space": ("ZImagePixelSpace",),
    "PiD, a decoder": ("PiD",),
    "PixelDiT": ("PixelDiTT2I",),
    "HiDream-O1": ("HiDreamO1",),
    "Chroma Radiance": ("ChromaRadiance",),
    "Boogu-Image": ("Boogu",),
    "Mage-Flow": ("MageFlow",),
    "JoyImage": ("JoyImage",),
    "Lens": ("Lens",),
    "Anima": ("Anima",),
}


OWN_CLASS = {
    *("Flux", "FluxInpaint", "FluxSchnell", "PixArtAlpha", "PixArtSigma"),
    *("AuraFlow", "HiDreamO1", "ChromaRadiance", "Boogu", "MageFlow", "JoyImage", "Lens", "ErnieImage", "LongCatImage"),
    *("Chroma", "Lumina2", "Ideogram4", "Kandinsky5", "Kandinsky5Image", "WAN22_S2V", "WAN21_HuMo", "WAN22_WanDancer"),
    *("WAN21_CausalAR_T2V", "WAN21_Camera", "WAN22_Camera", "CogVideoX_T2V", "CogVideoX_I2V", "CogVideoX_Inpaint"),
    *("HunyuanVideo", "HunyuanVideoI2V", "HunyuanVideoSkyreelsI2V", "HunyuanVideo15", "HunyuanVideo15_SR_Distilled"),
    *("HunyuanImage21", "HunyuanImage21Refiner", "GenmoMochi", "CosmosT2IPredict2"),
    *(
        "CosmosI2VPredict2",
        "Anima",
        "HiDream",
        "HunyuanDiT",
        "HunyuanDiT1",
        "LTXV",
        "LTXAV",
        "Flux2",
        "ZImage",
        "SD3",
        "QwenImage",
        "Krea2",
        *("WAN21_T2V", "WAN21_I2V", "WAN21_FunControl2V", "WAN22_T2V", "WAN21_FlowRVS"),
        "WAN21_Vace",
        "WAN22_Animate",
        "WAN21_SCAIL",
        "WAN21_SCAIL2",
    ),
}
"""Classes that no family computes, which run on ranks as ComfyUI's own if a trial of the call proves it. Of a few others the
files here lack what ComfyUI's detection takes for granted."""

NEWER = {case.native.newer for case in all_cases() if case.native and case.native.newer}
"""Classes that the oldest ComfyUI of the tests lacks."""


@pytest.fixture(scope="module")
def found(request, inside):
    names = {item.originalname for item in request.session.items if item.path == request.path}
    return inside.run("native_classes", with_files=names != {"test_a_header_says_nothing_that_we_overlook"})[0]


@pytest.mark.full
def test_a_native_file_of_every_class_is_ours_or_refused(found):
    found = {kind: got for kind, got in found.items() if kind != "header entries"}
    ours = {kind for family in FAMILIES.values() for kind in family.native_classes}
    ours -= NEWER - set(found)
    assert ours <= set(found)
    assert len(found) > 90
    loaded = {kind: got for kind, got in found.items() if "error" not in got}
    assert loaded == {kind: {"model": kind} for kind in ours | (OWN_CLASS & set(found))}
    refused = {kind: got["error"] for kind, got in found.items() if kind not in loaded}
    begins = "ValueError: model_name: ", "UnknownModel: model_name: "
    assert {kind: error for kind, error in refused.items() if not error.startswith(begins)} == {}
    names = {kind: name for name, kinds in NAMED.items() for kind in kinds}
    assert {kind: error for kind, error in refused.items() if names.get(kind, "no name") not in error} == {}


def test_a_header_says_nothing_that_we_overlook(found):
    for family, entries in found["header entries"].items():
        assert FAMILIES[family].file.header.values.keys() >= set(entries)
