"""A ComfyUI that has only the planted classes, in the test process and in ranks that are threads of it."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.built.building import imported
from parallel_backend.own_class.built.built_class import built_class

CLASSES = Path(__file__).parents[1] / "own_class"
MODULES = {
    f"comfy.ldm.{path.stem}": importlib.import_module(f"tests.own_class.{path.stem}")
    for path in sorted(CLASSES.glob("planted_*.py"))
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
    kind = next(vars(module)[name] for module in MODULES.values() if _has(module, name))
    module = f"comfy.ldm.{kind.__module__.rpartition('.')[2]}"
    return OwnClass(getattr(kind, "kind", "Planted"), "/nowhere", module, name, "{}", (), (), (), ("bf16",), True)


def _has(module: ModuleType, name: str) -> bool:
    """Whether the class is defined there."""
    return getattr(getattr(module, name, None), "__module__", "") == module.__name__
