"""Chooses folders for code that a rank's libraries compile. Only this user can write to them.

torch and Triton later load such files as code: libraries, pickles, headers. torch's default is a folder with the user's name
in the machine's temporary folder. Anyone can create that first, and torch checks neither owner nor mode. This module only
needs the standard library, because torch reads these variables when it is imported.
"""

import logging
import os
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

TEMPORARY = "TMPDIR"
FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton", TEMPORARY: "tmp"}
"""Variable -> subfolder of ours. torch puts compiled headers into the temporary folder (codecache's _HEADER_DIR), whatever
its own variable says."""


def keep_compiled_code_private(environment: MutableMapping[str, str] = os.environ, scratch: Path | None = None) -> None:
    """Set the variables of FOLDERS to folders of this user, which are created if necessary. A user's own setting stays if
    only this user can write there.

    `environment`: variables of this process. `scratch`: a folder of this user to use if the folder in the home directory
    cannot be used; compiled code is then lost with it. None: a new temporary folder. Does nothing on Windows, where each
    user has a temporary folder.
    """
    if sys.platform == "win32":
        return
    cache = _cache(environment)
    ours = cache if cache is not None and _is_private(cache) else scratch or Path(tempfile.mkdtemp(prefix="parallel-dit-"))
    for name, folder in FOLDERS.items():
        given = environment.get(name)
        if given is not None and _is_private(Path(given)):
            continue
        if given is not None and name != TEMPORARY:
            log.warning("Parallel DiT: %s is not used, because others can write to %s. %s is", name, given, ours / folder)
        (ours / folder).mkdir(mode=0o700, exist_ok=True)
        environment[name] = str(ours / folder)
    tempfile.tempdir = environment[TEMPORARY]


def _cache(environment: MutableMapping[str, str]) -> Path | None:
    """Return our folder in this user's cache. None if the user has no home directory."""
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "parallel_dit"
    except RuntimeError:
        return None


def _is_private(folder: Path) -> bool:
    """Whether the folder belongs to this user, and others cannot write to it. Creates it if necessary."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
