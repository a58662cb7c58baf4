"""Results that later processes read again: JSON files with a digest, and a key that says for what the result is valid."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BYTES = 1 << 20
"""Maximum bytes of a file. The calibration of eight devices has about ten thousand."""


def read_kept(path: Path, key: dict[str, object], name: str) -> Any | None:
    """Return the content of the file, stored there as `name`. None if there is no file, or it has another key. Raises
    OSError, ValueError, LookupError, TypeError or RecursionError for a file that is damaged, too long, or was changed."""
    if not path.exists():
        return None
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ValueError("no file, or too long")
    file = json.loads(path.read_text())
    if _text(file["key"]) != _text(key):
        return None
    if digest(file[name]) != file["digest"]:
        raise ValueError("it has been changed since it was written")
    return file[name]


UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of `read_kept`, and errors that readers of its content may raise."""


def write_kept(path: Path, key: dict[str, object], name: str, content: object) -> None:
    """Atomically: a concurrent reader sees the old file or the new one. OSError if it cannot be written. ValueError for NaN
    and infinity, which are not JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, name: content, "digest": digest(content)}, file, indent=1, allow_nan=False)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def find_kept(folder: Path, key: dict[str, object], name: str, read: Callable[[Any], T]) -> T | None:
    """`read(content)` of the key's file in `folder`. None if there is no usable file; the log says why it is unusable."""
    path = kept_path(folder, key, name)
    try:
        content = read_kept(path, key, name)
        return None if content is None else read(content)
    except UNREADABLE as error:
        log.warning("Parallel DiT: %s is ignored (%s)", path, error)
        return None


def keep(folder: Path, key: dict[str, object], name: str, content: object) -> None:
    """Write the key's file in `folder`. If that fails, it is only logged, and later processes compute the result again."""
    path = kept_path(folder, key, name)
    try:
        write_kept(path, key, name, content)
    except OSError as error:
        log.warning("Parallel DiT: %s could not be stored (%s)", path, error)


def kept_path(folder: Path, key: dict[str, object], name: str) -> Path:
    """Return the file of a key."""
    return folder / f"{name}-{digest(key)[:16]}.json"


def digest(content: object) -> str:
    """Return the digest of JSON values."""
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _text(content: object) -> str:
    return json.dumps(content, sort_keys=True)
