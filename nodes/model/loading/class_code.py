"""The code of ComfyUI's classes for which a trial is valid: modules, their imports, and the arguments that they read."""

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel_backend.core.own_class import ROOT, OwnClass
from parallel_backend.own_class.built.building import class_of

PACKAGE = "comfy"
UNREAD = frozenset({"comfy.cli_args", "comfy.model_management"})
"""Modules that decide on devices and memory but not on values. Almost every release changes them."""


Code = list[tuple[str, bytes]]
"""(name of a module, its code) for several modules."""


def code_digest(code: Code) -> str:
    """Return the digest of the code that `class_code` returned."""
    found = hashlib.sha256()
    for name, text in code:
        found.update(name.encode() + b"\0" + text + b"\0")
    return found.hexdigest()


def class_code(own: OwnClass, helpers: bool = True) -> Code:
    """Return the class's module and everything that it imports below ROOT, from the class's folder. Nothing is imported.
    `helpers`: also what these import from the rest of PACKAGE, except UNREAD, but not the imports of those."""
    found: dict[str, bytes] = {}
    coming = [own.module]
    while coming:
        name = coming.pop()
        path = _file(Path(own.folder), name)
        if name in found or name in UNREAD or path is None or not (helpers or name.startswith(ROOT)):
            continue
        found[name] = path.read_bytes()
        if name.startswith(ROOT):
            coming += [name.rpartition(".")[0], *_named(name, found[name].decode(), path.name == "__init__.py")]
    return sorted(found.items())


def deciding_arguments(own: OwnClass, code: Code) -> dict[str, Any]:
    """Return the constructor's arguments that can matter: those that the class's `code` (without helpers) names and that
    differ from the class's defaults."""
    words = {word for _, text in code for word in re.findall(r"\w+", text.decode())}
    given = json.loads(own.arguments)
    parameters = inspect.signature(class_of(own)).parameters
    named = {name: value for name, value in given.items() if name in words}
    return {
        name: value for name, value in named.items() if name not in parameters or _listed(parameters[name].default) != value
    }


def _listed(value: Any) -> Any:
    """Return the value as JSON has it."""
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def _file(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def _named(module: str, text: str, is_package: bool) -> Iterator[str]:
    """Yield names of PACKAGE that the code imports, or uses with a full name without an import. Some may not be modules."""
    for statement in ast.walk(ast.parse(text)):
        if isinstance(statement, ast.ImportFrom):
            # Of a package's own file the first level is the package itself.
            levels = statement.level - is_package
            inside = ".".join(module.split(".")[:-levels] if levels else module.split(".")) if statement.level else ""
            origin = ".".join(filter(None, (inside, statement.module)))
            yield origin
            yield from (f"{origin}.{each.name}" for each in statement.names)
    yield from re.findall(rf"\b{PACKAGE}\.(?:ldm(?:\.\w+)+|\w+)", text)
