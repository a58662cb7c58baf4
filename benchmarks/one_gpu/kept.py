"""A part's JSON, written anew after each figure: a part that is cut leaves what it has found."""

import argparse
import json
from pathlib import Path
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a part."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path)
    return options


def keep(out: Path | None, result: dict[str, Any]) -> None:
    """`result["summary"]`: one line. `result["lacks"]`, if there is one: why the machine cannot run the part."""
    text = json.dumps(result, indent=1)
    print(text if out is None else result.get("summary", ""), flush=True)
    if out is not None:
        new = out.with_suffix(".new")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(out)
