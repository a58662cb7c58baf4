"""Digest of the code that a trial of one of ComfyUI's classes holds for: its module, and what that imports."""

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from parallel_backend.core.own_class import ROOT

PACKAGE = "comfy"
UNREAD = frozenset({"comfy.cli_args", "comfy.model_management"})
"""Say on which device and in which memory values are, and not what they are. Almost every release changes them."""


def code_digest(folder: Path, module: str) -> str:
    """Digest of the module's code and of all that it imports below ROOT, and of what those import of the rest of PACKAGE
    (in `folder`), but for UNREAD: helpers whose own imports are left aside. Nothing is imported."""
    found: dict[str, Path] = {}
    coming = [module]
    while coming:
        name = coming.pop()
        path = _file(folder, name)
        if name in found or name in UNREAD or path is None:
            continue
        found[name] = path
        if name.startswith(ROOT):
            coming += [name.rpartition(".")[0], *_named(name, path)]
    code = hashlib.sha256()
    for name in sorted(found):
        code.update(name.encode() + b"\0" + found[name].read_bytes() + b"\0")
    return code.hexdigest()


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
