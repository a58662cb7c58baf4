"""The registry of families: a file each, a row here."""

from parallel_backend.families.base.family import Family

from . import (
    chroma,
    cogvideox,
    ernie_image,
    flux,
    flux2,
    hunyuan_dit,
    hunyuan_video,
    krea2,
    longcat_image,
    ltx_video,
    lumina2,
    minimax_h3,
    ovis_image,
    pixart,
    qwen_image,
    sana,
    sd3,
    wan,
    wan_animate_2,
    wan_vace,
    z_image,
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        flux.FLUX,
        longcat_image.LONGCAT_IMAGE,
        ovis_image.OVIS_IMAGE,
        chroma.CHROMA,
        flux2.FLUX2,
        sd3.SD3,
        pixart.PIXART,
        sana.SANA,
        hunyuan_dit.HUNYUAN_DIT,
        qwen_image.QWEN_IMAGE,
        krea2.KREA2,
        ernie_image.ERNIE_IMAGE,
        z_image.Z_IMAGE,
        lumina2.LUMINA2,
        wan_animate_2.WAN_ANIMATE_2,
        wan.WAN,
        wan_vace.WAN_VACE,
        minimax_h3.MINIMAX_H3,
        ltx_video.LTX_VIDEO,
        hunyuan_video.HUNYUAN_VIDEO,
        cogvideox.COGVIDEOX,
        cogvideox.COGVIDEOX_15,
    )
}
