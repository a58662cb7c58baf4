"""One file per family: tiny configurations, how diffusers' pipelines call the model, and what ComfyUI needs to build it."""

import importlib
import pkgutil

from testing.cases.case import Case


def all_cases() -> list[Case]:
    """All `CASES` of the modules in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "case")
    return [case for name in names for case in importlib.import_module(f"{__name__}.{name}").CASES]


OF_EACH_FORM = "qwen-image-2.1", "wan-animate-2"
"""Families that together have most forms of blocks, text and latents: a joint stream, text by cross-attention, text that
every rank has whole, text that runs once a run, videos."""
