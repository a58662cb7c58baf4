"""Results that later processes read again: JSON files with a key that says what a result is valid for, and a digest."""

import hashlib
import json
from pathlib import Path
from typing import Any

from .json_file import write_json

MAX_BYTES = 1 << 20
"""Maximum number of bytes of a file. The calibration of eight devices has about ten thousand."""


def read_kept(path: Path, key: dict[str, object], name: str) -> Any | None:
    """The content, called `name` in the file. None if there is no such file, or it has another key.

    OSError, ValueError, LookupError, TypeError or RecursionError for a file that is damaged, too long, or was changed.
    """
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


UNREADABLE = (OSError, ValueError, LookupError, TypeError, RecursionError)
"""Errors of `read_kept`, and those that readers of its content may raise."""


def write_kept(path: Path, key: dict[str, object], name: str, content: object) -> None:
    """Atomically, see write_json. OSError if it cannot be written."""
    write_json(path, {"key": key, name: content, "digest": digest(content)})


def kept_path(folder: Path, key: dict[str, object], name: str) -> Path:
    """The file of a key."""
    return folder / f"{name}-{digest(key)[:16]}.json"


def digest(content: object) -> str:
    """Digest of JSON values."""
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _text(content: object) -> str:
    return json.dumps(content, sort_keys=True)
