"""The DiT families: one small file each, one row here."""

from . import chroma, flux, flux2, qwen_image, sd3
from .base import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (flux.FLUX, chroma.CHROMA, flux2.FLUX2, sd3.SD3, qwen_image.QWEN_IMAGE)
}
