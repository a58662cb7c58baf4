"""The registry of VAEs: a file each, a row here. What each class is, and what ranks run of it on bands of a picture."""

from . import cosmos, hunyuan, ldm, ltx, minimax_h3, wan
from .base import VAEClass

_ROWS = (
    ldm.KL,
    ldm.HUNYUAN_VIDEO,
    hunyuan.HUNYUAN_VIDEO_15,
    hunyuan.HUNYUAN_IMAGE,
    hunyuan.HUNYUAN_IMAGE_REFINER,
    ltx.LTX,
    cosmos.COSMOS,
    wan.WAN,
    minimax_h3.MINIMAX_H3,
)
VAES: dict[str, VAEClass] = {row.name: row for row in _ROWS}
