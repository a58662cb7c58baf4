"""The code of ComfyUI's classes that a trial holds for: modules, what they import, and which arguments they read."""

import ast
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel_backend.core.own_class import ROOT, OwnClass
from parallel_backend.families.own_class.building import class_of

PACKAGE = "comfy"
UNREAD = frozenset({"comfy.cli_args", "comfy.model_management"})
"""Say on which device and in which memory values are, and not what they are. Almost every release changes them."""


def code_digest(folder: Path, module: str, helpers: bool = True) -> str:
    """Digest of `class_files`."""
    code = hashlib.sha256()
    for name, path in class_files(folder, module, helpers):
        code.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return code.hexdigest()


def modules_named_by(kind: type) -> tuple[str, ...]:
    """ComfyUI's modules that the code of a class's module names by their full names. They are imported in this process."""
    code = inspect.getsource(sys.modules[kind.__module__])
    named = {f"{PACKAGE}.{name}" for name in re.findall(rf"\b{PACKAGE}\.(\w+)", code)}
    return tuple(sorted(name for name in named if name in sys.modules and name != ROOT.rstrip(".")))


def class_files(folder: Path, module: str, helpers: bool) -> list[tuple[str, Path]]:
    """The module and all that it imports below ROOT (in `folder`), by name. Nothing is imported.

    `helpers`: and what those import of the rest of PACKAGE, but for UNREAD. Their own imports are left aside.
    """
    found: dict[str, Path] = {}
    coming = [module]
    while coming:
        name = coming.pop()
        path = _file(folder, name)
        if name in found or name in UNREAD or path is None or not (helpers or name.startswith(ROOT)):
            continue
        found[name] = path
        if name.startswith(ROOT):
            coming += [name.rpartition(".")[0], *_named(name, path)]
    return sorted(found.items())


def deciding_arguments(own: OwnClass) -> dict[str, Any]:
    """The constructor's arguments that can matter: that the class's code names, and that are not what it has by default."""
    words = set()
    for _, path in class_files(Path(own.folder), own.module, helpers=False):
        words |= set(re.findall(r"\w+", path.read_text()))
    given = json.loads(own.arguments)
    parameters = inspect.signature(class_of(own)).parameters
    named = {name: value for name, value in given.items() if name in words}
    return {
        name: value for name, value in named.items() if name not in parameters or _listed(parameters[name].default) != value
    }


def _listed(value: Any) -> Any:
    """As JSON has it."""
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def _file(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def _named(module: str, path: Path) -> Iterator[str]:
    """Modules of PACKAGE that the code imports, or names in full and leaves it to others to import. Some may be none."""
    text = path.read_text()
    for statement in ast.walk(ast.parse(text)):
        if isinstance(statement, ast.ImportFrom):
            # Of a package's own file the first level is the package itself.
            levels = statement.level - (path.name == "__init__.py")
            inside = ".".join(module.split(".")[:-levels] if levels else module.split(".")) if statement.level else ""
            origin = ".".join(filter(None, (inside, statement.module)))
            yield origin
            yield from (f"{origin}.{each.name}" for each in statement.names)
    yield from re.findall(rf"\b{PACKAGE}\.(?:ldm(?:\.\w+)+|\w+)", text)
