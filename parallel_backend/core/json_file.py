"""Small JSON files that several processes may read and write."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write the file atomically: a concurrent reader sees either the old file or the new one. Raises OSError if it cannot be
    written, ValueError for NaN and infinity, which are not JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1, allow_nan=False)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
