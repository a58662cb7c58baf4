"""The registry of families. Each family has a file in this folder and a row here."""

from . import (
    seedvr2,
    wan_animate_2,
)
from .base.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        wan_animate_2.WAN_ANIMATE_2,
        seedvr2.SEEDVR2,
    )
}
