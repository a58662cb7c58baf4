"""The registry of VAEs: one file for each architecture, one row for each class whose parts ranks can run on bands."""

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
