"""A ComfyUI that has only the planted classes, in the test process and in ranks that are threads of it."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.built.building import imported
from parallel_backend.own_class.built.built_class import built_class
from tests.own_class import (
    planted_bands,
    planted_between,
    planted_classes,
    planted_features,
    planted_forms,
    planted_guided,
    planted_prefix,
    planted_references,
    planted_refiners,
    planted_residuals,
    planted_rows,
    planted_second,
    planted_skips,
    planted_tokens,
    planted_widths,
)

MODULES = {
    "comfy.ldm.planted": planted_classes,
    "comfy.ldm.planted_tokens": planted_tokens,
    "comfy.ldm.planted_forms": planted_forms,
    "comfy.ldm.planted_bands": planted_bands,
    "comfy.ldm.planted_between": planted_between,
    "comfy.ldm.planted_refiners": planted_refiners,
    "comfy.ldm.planted_references": planted_references,
    "comfy.ldm.planted_features": planted_features,
    "comfy.ldm.planted_widths": planted_widths,
    "comfy.ldm.planted_residuals": planted_residuals,
    "comfy.ldm.planted_skips": planted_skips,
    "comfy.ldm.planted_guided": planted_guided,
    "comfy.ldm.planted_prefix": planted_prefix,
    "comfy.ldm.planted_rows": planted_rows,
    "comfy.ldm.planted_second": planted_second,
}


@contextlib.contextmanager
def planted_comfyui() -> Iterator[None]:
    """Context in which the classes can be imported."""
    modules = {name: ModuleType(name) for name in ("comfy", "comfy.ldm")} | MODULES
    with mock.patch.dict(sys.modules, modules):
        yield
    imported.cache_clear()
    built_class.cache_clear()


def as_folder(module: str, folder: Path) -> str:
    """`folder`, in which ranks that are processes find this module of planted classes."""
    (package := folder / "comfy" / "ldm").mkdir(parents=True)
    (package / f"{module.rpartition('.')[2]}.py").write_text(f"from {MODULES[module].__name__} import *\n")
    return str(folder)


def planted(name: str) -> OwnClass:
    """The class of this name, as nodes would describe it."""
    module = next(each for each, classes in MODULES.items() if hasattr(classes, name))
    kind = getattr(getattr(MODULES[module], name), "kind", "Planted")
    return OwnClass(kind, "/nowhere", module, name, "{}", (), (), (), ("bf16",), True)
