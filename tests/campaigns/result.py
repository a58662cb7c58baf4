"""The file with a campaign's result."""

import json
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring


def keep(path: Path | None, **found: Any) -> None:
    """Writes what was found as JSON, with date and hardware. `path`: None if nobody asked for it."""
    if path is not None:
        result = {"date": date.today().isoformat(), "hardware": measuring.hardware()} | found
        path.write_text(json.dumps(result, indent=1) + "\n")
