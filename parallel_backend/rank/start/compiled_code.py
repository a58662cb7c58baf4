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

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton"}
"""Variable -> folder in ours. A user's own setting stays if only this user can write there."""
TEMPORARY = "TMPDIR"
"""torch has compiled headers (codecache's _HEADER_DIR) in the temporary folder, whatever its own variable says."""


def keep_compiled_code_private(environment: MutableMapping[str, str] = os.environ, scratch: Path | None = None) -> None:
    """Set the variables in CACHES to folders that belong to this user. Folders that do not exist are made.

    `environment`: variables of this process. `scratch`: a folder of this user, for use if the folder in the home directory
    cannot be used. Code compiled there is lost with it. None: a new temporary folder. Does nothing on Windows, because each
    user has a temporary folder there.
    """
    if sys.platform == "win32":
        return
    ours = _home(environment) or scratch or Path(tempfile.mkdtemp(prefix="parallel-dit-compiled-"))
    for name, folder in CACHES.items():
        given = environment.get(name)
        if given is not None:
            if (reason := _reason(Path(given))) is None:
                continue
            log.warning(
                "Parallel DiT: %s is not used, because %s. Compiled code is kept in %s. To choose another folder, set "
                "%s to one that only you can write to",
                *(name, reason, ours / folder, name),
            )
        environment[name] = str(ours / folder)
    if TEMPORARY not in environment or _reason(Path(environment[TEMPORARY])) is not None:
        temporary = ours / "tmp"
        temporary.mkdir(mode=0o700, exist_ok=True)
        environment[TEMPORARY] = tempfile.tempdir = str(temporary)


def not_private(folder: Path) -> str | None:
    """Why others could put files into the folder, or another one in its place: the end of a sentence. None: they cannot.

    Whose the folders above are does not matter, unless all can make some there: who has a home has all in it.
    """
    for path in dict.fromkeys((folder.absolute(), folder.resolve())):
        open_to_all = False
        for place in (*reversed(path.parents), path):
            here = place.stat()
            if open_to_all and place.lstat().st_uid not in (0, os.geteuid()):
                return f"{place} belongs to another user (number {place.lstat().st_uid})"
            if here.st_mode & stat.S_IWOTH and place != path:
                open_to_all = True
                if not here.st_mode & stat.S_ISVTX:
                    return f"other users can rename files in {place}"
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder"
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user (number {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {folder}"
    return None


def _reason(folder: Path) -> str | None:
    """As `not_private`, after the folder has been made if it was not there."""
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # ranks start at once, and another one may make it now
        return not_private(folder)
    except OSError as error:
        return f"{folder} cannot be created or read ({error.strerror})"


def _home(environment: MutableMapping[str, str]) -> Path | None:
    """The folder in this user's cache. None: it cannot be made, or is not this user's alone."""
    given = environment.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "parallel_dit"
    except RuntimeError:  # a user without a home
        return None
    if (reason := _reason(folder)) is not None:
        log.warning("Parallel DiT: compiled code is not kept for the next start, because %s", reason)
        return None
    return folder
