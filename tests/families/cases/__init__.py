"""One file per family: tiny configurations, how diffusers' pipelines call the model, and what ComfyUI needs to build it."""

import importlib
import pkgutil

from tests.families.cases.case import Case


def all_cases() -> list[Case]:
    """Every `CASES` of the modules beside this file."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "case")
    return [case for name in names for case in importlib.import_module(f"{__name__}.{name}").CASES]
