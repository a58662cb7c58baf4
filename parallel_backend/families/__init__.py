"""The DiT families: one small file each, one row here."""

from . import flux
from .base import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (flux.FLUX,)}
