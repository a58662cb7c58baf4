"""Imports as if some packages were not installed, or torch had no compiler."""

import importlib
import sys
import types
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


@contextmanager
def blocked_imports(*packages: str) -> Iterator[None]:
    """Within it these packages cannot be imported. Packages that were imported before stay."""
    blocked = [package for package in packages if package not in sys.modules]
    modules: MutableMapping[str, Any] = sys.modules
    modules.update(dict.fromkeys(blocked))  # None in the place of a module makes its import fail
    try:
        yield
    finally:
        for package in blocked:
            del sys.modules[package]


UNUSED = ("scipy", "torchvision", "transformers")
"""Packages that only diffusers' schedulers, pipelines and pictures need: in ComfyUI a third of what a rank would import."""


@contextmanager
def light_imports() -> Iterator[None]:
    """Within it diffusers is imported without what a rank does not need of it: see UNUSED and `without_compiler`."""
    if "diffusers" in sys.modules:  # which has found out what is installed, and imports it later
        yield
        return
    with blocked_imports(*UNUSED), without_compiler():
        yield


COMPILER = "torch._dynamo"


class _Exemptions(types.ModuleType):
    """Stands in for torch's compiler with those of its functions that exempt others from it, and change nothing here.

    What else is asked for, a submodule too, is the compiler's, which is imported then: an installed package may need it.
    """

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.__path__: list[str] = []
        self.allow_in_graph = self.disable = _unchanged

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.give_way(), name)

    def give_way(self) -> types.ModuleType:
        """The compiler, imported if need be."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        return importlib.import_module(COMPILER)


@dataclass(frozen=True)
class _Submodules(MetaPathFinder):
    """Finds submodules of the compiler while `stand_in` is in its place: they are the compiler's own."""

    stand_in: _Exemptions

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}.") or sys.modules.get(COMPILER) is not self.stand_in:
            return None
        self.stand_in.give_way()
        module = importlib.import_module(name)
        return ModuleSpec(name, _Imported(module, module.__spec__))


@dataclass(frozen=True)
class _Imported(Loader):
    """Loads a module that has been imported by another way meanwhile. `spec`: what it was imported by."""

    module: types.ModuleType
    spec: ModuleSpec | None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec


def _unchanged(function: Any = None, *_arguments: Any, **_named: Any) -> Any:
    return (lambda each: each) if function is None else function


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within it torch's compiler is imported by those alone that need more of it than to exempt functions from it.

    diffusers imports it for that: a rank would import twice as much, for four seconds in place of two. What compiles blocks
    imports it later (rank/stage/compile.py), and compiles none of those functions.
    """
    import torch.compiler

    if COMPILER in sys.modules:
        yield
        return
    stand_in, disable = _Exemptions(), torch.compiler.disable
    submodules = _Submodules(stand_in)
    sys.modules[COMPILER] = stand_in
    sys.meta_path.insert(0, submodules)
    torch.compiler.disable = _unchanged  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = disable
        sys.meta_path.remove(submodules)
        if sys.modules.get(COMPILER) is stand_in:
            del sys.modules[COMPILER]
