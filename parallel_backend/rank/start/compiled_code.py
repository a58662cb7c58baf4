"""Chooses folders for code that a rank's libraries compile. Only this user can write to them.

torch and Triton load such files later as code: libraries, pickles, headers. torch's usual place is a folder by the user's
name in the machine's temporary folder, which anybody can make first; torch looks neither at its owner nor at its mode. This
module needs the standard library alone, since torch reads these variables as it is imported.
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
"""Variable -> folder in ours. torch has compiled headers in the temporary folder (codecache's _HEADER_DIR), whatever its own
variable says."""


def keep_compiled_code_private(environment: MutableMapping[str, str] = os.environ, scratch: Path | None = None) -> None:
    """Set the variables of FOLDERS to folders that belong to this user, and are made if they do not exist. A user's own
    setting stays if only this user can write there.

    `environment`: variables of this process. `scratch`: a folder of this user, for use if the folder in the home directory
    cannot be used. Code compiled there is lost with it. None: a new temporary folder. Does nothing on Windows, because each
    user has a temporary folder there.
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
    """The folder in this user's cache. None: a user without a home."""
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "parallel_dit"
    except RuntimeError:
        return None


def _is_private(folder: Path) -> bool:
    """Whether the folder, which is made if it is not there, belongs to this user, and others cannot write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
