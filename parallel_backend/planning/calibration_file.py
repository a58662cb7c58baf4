"""Calibrations on disk: one small JSON file for each machine, kind of model and dtype."""

import json
from pathlib import Path

from parallel_backend.core import kept_file
from parallel_backend.wire.encoding import Encoding

from .calibrated_costs import Calibration

NAME = "calibration"
_ENCODING = Encoding((Calibration,))


def keep(folder: Path, key: dict[str, object], calibration: Calibration) -> None:
    """See kept_file.keep."""
    kept_file.keep(folder, key, NAME, json.loads(_ENCODING.encode(calibration)[0]))


def load(folder: Path, key: dict[str, object]) -> Calibration | None:
    """See kept_file.find_kept."""
    return kept_file.find_kept(folder, key, NAME, lambda content: _ENCODING.decode(json.dumps(content).encode())[0].message)
