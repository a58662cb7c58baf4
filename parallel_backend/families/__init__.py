"""The DiT families: one small file each, one row here."""

from . import flux, sd3
from .base import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (flux.FLUX, sd3.SD3)}
