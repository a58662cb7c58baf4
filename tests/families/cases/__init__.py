"""One file per family: tiny configurations, how diffusers' pipelines call the model, and what ComfyUI needs to build it."""

import importlib
import pkgutil
from collections.abc import Iterable

import pytest

from tests.families.cases.case import Case


def all_cases() -> list[Case]:
    """Every `CASES` of the modules beside this file."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "case")
    return [case for name in names for case in importlib.import_module(f"{__name__}.{name}").CASES]


OF_EACH_FORM = (
    *("flux", "sd3", "qwen-image", "krea2", "z-image", "lumina2", "pixart", "hunyuan-dit", "hidream-i1"),
    *("wan", "wan-vace", "hunyuan-video", "ltx-2", "minimax-h3"),
)
"""Families that have between them every form of blocks, text and latents: two streams in one order and the other, one
stream, text looked at, text whole, long skips, experts, streams beside, videos, sound."""


def of_each_form(cases: Iterable[Case]) -> list[pytest.param]:
    """As `one_of_each`, for what a family's form decides: other families are for the full tier too."""
    return [
        param if param.values[0].family in OF_EACH_FORM else pytest.param(*param.values, id=param.id, marks=pytest.mark.full)
        for param in one_of_each(cases)
    ]


def one_of_each(cases: Iterable[Case]) -> list[pytest.param]:
    """The cases as parameters, for what a family decides and not its variants: of those of one family and one class of cases
    all but the first are for the full tier."""
    seen, params = set(), []
    for case in cases:
        kind = case.family, type(case)
        params.append(pytest.param(case, id=case.name, marks=pytest.mark.full if kind in seen else ()))
        if not case.full:
            seen.add(kind)
    return params
