"""Which ComfyUI and which diffusers the pack may be loaded with. Imports neither, but for ComfyUI's file of its version."""

import importlib
import importlib.metadata
import importlib.util
import logging
import re
from pathlib import Path

OLDEST = (0, 33, 0)
"""The oldest ComfyUI that it is tested in, and `requires-comfyui` of pyproject.toml."""
DIFFUSERS = (0, 38), (0, 42)
"""Oldest and newest minor version of diffusers that it is tested with: the bounds in pyproject.toml."""


def check_comfyui() -> None:
    """RuntimeError, saying what to do, in a ComfyUI older than OLDEST. A version without numbers is let pass."""
    try:
        version = importlib.import_module("comfyui_version").__version__
        numbers = re.match(r"v?(\d+(?:\.\d+)*)", version)
        if numbers is None or tuple(map(int, numbers[1].split("."))) >= OLDEST:
            return
        found = f"is {version}"
    except ImportError:
        found = "is so old that it does not say its version"
    oldest = ".".join(map(str, OLDEST))
    raise RuntimeError(f"Parallel DiT needs ComfyUI {oldest} or newer, and this one {found}. Update ComfyUI and restart it.")


def check_backend(root: Path) -> None:
    """RuntimeError, saying what to do, if `parallel_backend` is an installed copy, not that of the pack's folder `root`.

    ComfyUI's path has installed packages first, so an older copy would run in place of this one.
    """
    spec = importlib.util.find_spec("parallel_backend")
    assert spec is not None and spec.origin is not None
    found = Path(spec.origin).resolve().parents[1]
    if found != root.resolve():
        raise RuntimeError(
            f"Parallel DiT's parallel_backend is also installed in {found}. Remove it with ComfyUI's Python: python -m pip "
            "uninstall parallel-dit. Then restart ComfyUI."
        )


def warn_of_folder(name: str) -> None:
    """A warning in the log if ComfyUI cannot serve pages from a pack's folder of this name, which is in their addresses."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        only_dots = re.fullmatch(r"[A-Za-z0-9_.-]+", name)
        lost = "help pages" if only_dots else "menu entry, panel, templates and help pages"
        logging.warning("Parallel DiT's %s do not work in a folder named '%s'. Rename it to parallel-dit.", lost, name)


def check_diffusers() -> None:
    """RuntimeError, saying what to do, where diffusers is absent or older than the first of DIFFUSERS; a warning in the log
    where it is newer than the last one, since a newer one may work. A version without numbers is let pass."""
    oldest, newest = (".".join(map(str, version)) for version in DIFFUSERS)
    tested = f"diffusers {oldest} to {newest}"
    update = "Install requirements.txt of its folder with ComfyUI's Python and restart ComfyUI."
    try:
        version = importlib.metadata.version("diffusers")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(f"Parallel DiT needs {tested}, which is not installed. {update}") from None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    minor = DIFFUSERS[1] if numbers is None else tuple(map(int, numbers.groups()))
    if minor < DIFFUSERS[0]:
        raise RuntimeError(f"Parallel DiT needs {tested}, and {version} is installed. {update}")
    if minor > DIFFUSERS[1]:
        logging.warning("Parallel DiT is tested with %s, and %s is installed: a model may fail to load.", tested, version)
