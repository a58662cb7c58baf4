"""Whether a model's files are unchanged since the client read their headers.

Ranks read a file later, one after the other, and streamed blocks again at each use if the host has no room for them. A file
that is overwritten, replaced or cut meanwhile would give weights of two models.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from parallel_backend.core.short_text import short


def file_state(paths: Iterable[Path]) -> str:
    """Digest of the files' names, sizes and times of change, or of the fact that a file is missing.

    The time of the inode's change (on Windows of the file's making) tells a file from another one of the same size that was
    given the same time, as copying with times and unpacking do: no program can set it. Inode numbers are left out, as some
    network drives give a file another one at each opening.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(set(paths)):
        try:
            status = path.stat()
        except OSError:
            digest.update(f"{path.name} none\n".encode(errors="surrogateescape"))
        else:
            times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
            digest.update(f"{path.name} {status.st_size} {times}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def has_changed(paths: Iterable[Path], expected: str) -> bool:
    """Whether the files are there, and their state is not `expected`. Files that are away for a moment, as on a network
    drive, have not changed."""
    paths = list(paths)
    return all(map(os.path.isfile, paths)) and file_state(paths) != expected


def check_file_state(paths: Iterable[Path], expected: str, name: str) -> None:
    """ValueError, naming the model `name`, if the files' state is not `expected`."""
    paths = list(paths)
    if file_state(paths) == expected:
        return
    if not all(map(os.path.isfile, paths)):
        raise ValueError(
            f"model_name: {short(name)} was removed from disk while it was in use. Weights that are not in memory must "
            "be read from it. Queue the prompt again when the file is back."
        )
    raise ValueError(
        f"model_name: {short(name)} was overwritten, replaced or cut on disk while it was in use. Its weights would come "
        "from two files. Queue the prompt again when the file is complete."
    )
