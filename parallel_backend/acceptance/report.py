"""Writes a self-test's results as one JSON, without names of machine and user, and as one page of text."""

import contextlib
import getpass
import importlib.metadata
import json
import math
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .checks import FAILED, NOT_LOOKED_AT, PASSED, STATUSES, Result
from .session import Settings

FORMAT, VERSION = "parallel-dit acceptance", 1
"""The version of the JSON document's schema."""
SCHEMA = Path(__file__).with_name("acceptance.schema.json")
HOMES = re.compile(r"([\\/](?:home|Users)[\\/])[^\\/:;,'\"<>|()\n]+")
"""Matches the home folder of any user, with the user's name."""
ROOT = Path(__file__).resolve().parents[2]
LONGEST_WHY = 4000
"""Maximum number of characters of a text in the JSON. A longer text loses its middle."""
DIGITS = 5
"""The number of significant digits of a figure."""
KEPT_PARTS = 2
"""The number of folders and files that are kept at the end of a path."""
PATH = re.compile(r"(?<![\w.~/:])(?:[A-Za-z]:)?(?:[\\/][^\\/:;,'\"<>|()\n]+){2,}[\\/][\w.+@~-]+")
"""Matches an absolute path of more than KEPT_PARTS parts. Because folders may have spaces, text between two paths can match
too."""
SHOWN_WHY = 700
"""Maximum number of characters of a check's failures on the page. The JSON has more."""
SHOWN_TEXT = 120
"""Maximum number of characters of a figure that is text, such as a rank's error."""
MARKS = {PASSED: "ok     ", FAILED: "FAILED ", NOT_LOOKED_AT: "-      "}


def document_of(settings: Settings, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Return the document as a dict that json.dumps accepts."""
    checks = [asdict(result) | {"left_out": list(result.left_out)} for result in results]
    for check in checks:
        check["why"] = _cut(check["why"])
    document = {
        "format": FORMAT,
        "version": VERSION,
        "pack": pack_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(seconds, 1),
        "devices": list(settings.devices),
        "summary": {status: sum(result.status == status for result in results) for status in STATUSES},
        "checks": checks,
    }
    return _cleaned(document)


def impersonal(text: str) -> str:
    """Return the text without the names of machine and user, and with paths shortened to their last parts."""
    known = {str(Path.home()): "~", tempfile.gettempdir(): "TMP", str(ROOT): "PACK", os.getcwd(): "."}
    for folder in sorted(known, key=len, reverse=True):
        if len(folder) > 1:  # not the root
            text = text.replace(folder, known[folder])
    text = HOMES.sub(r"\1USER", text)
    text = PATH.sub(lambda path: ".../" + "/".join(re.split(r"[\\/]", path[0])[-KEPT_PARTS:]), text)
    for name, instead in ((socket.gethostname(), "HOST"), *((user, "USER") for user in _users())):
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def pack_version() -> str:
    """Return the pack's version from pyproject.toml, or from pip's metadata if pip has installed only the backend."""
    project = ROOT / "pyproject.toml"
    if not project.exists():
        return importlib.metadata.version("parallel-dit")
    line = re.search(r'^version = "(.*)"$', project.read_text(encoding="utf-8"), re.MULTILINE)
    return line[1] if line else "?"


def dumps(document: dict[str, Any]) -> str:
    """Return JSON with each list of numbers on one line."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[([^\[\]{}\"]*)\]", lambda items: "[" + re.sub(r"\s+", " ", items[1].strip()) + "]", text) + "\n"


def _cleaned(value: Any) -> Any:
    """Return the value with impersonal texts and rounded floats. Infinities and NaN, which JSON cannot express, become
    text."""
    if isinstance(value, dict):
        return {impersonal(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    return impersonal(value) if isinstance(value, str) else value


def _cut(text: str) -> str:
    half = LONGEST_WHY // 2
    return text if len(text) <= LONGEST_WHY else f"{text[:half]}\n[...]\n{text[-half:]}"


def _users() -> set[str]:
    """Return the names of the user that runs ComfyUI, and of the owners of this pack and its folder, who often differ."""
    names = {os.environ.get(variable, "") for variable in ("SUDO_USER", "LOGNAME", "USER", "USERNAME")}
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user without a name, or Windows without the variable
        names.add(getpass.getuser())
    for path in (ROOT, ROOT.parent, Path.cwd()):
        with contextlib.suppress(OSError, KeyError, NotImplementedError):
            names.add(path.owner())
    return names - {"root"}


def describe(document: dict[str, Any]) -> str:
    """Return the page of text. `document`: a document from `document_of`."""
    summary = document["summary"]
    counts = ", ".join(f"{count} {status}" for status, count in summary.items())
    head = f"Parallel DiT {document['pack']} self-test, {document['date']}: {counts}; {document['seconds']:.0f} s"
    lines = [head, f"ranks on {', '.join(document['devices'])}"]
    for check in document["checks"]:
        lines += ["", *_check(check)]
    if summary[FAILED]:
        end = "What to do about a failed check: docs/gpu.md. Please open an issue with the JSON."
    else:
        end = "Please add the JSON to an issue: results from machines with GPUs are needed most (docs/gpu.md)."
    return "\n".join([*lines, "", end])


def verdict(document: dict[str, Any]) -> str:
    """Return one line that says whether the self-test passed, such as "passed, 7 of 8 checks, 1 not looked at"."""
    summary, checks = document["summary"], document["checks"]
    count = f"{summary[PASSED]} of {len(checks)} checks"
    if summary[FAILED]:
        names = ", ".join(check["name"] for check in checks if check["status"] == FAILED)
        return f"self-test FAILED: {names}; {count} passed"
    left = f", {summary[NOT_LOOKED_AT]} not looked at" * bool(summary[NOT_LOOKED_AT])
    return f"self-test passed: {count}{left}"


def _check(check: dict[str, Any]) -> list[str]:
    lines = [f"{MARKS[check['status']]}{check['name']} ({check['seconds']:.1f} s): {check['about']}"]
    if check["why"]:
        why = check["why"] if len(check["why"]) <= SHOWN_WHY else f"...{check['why'][-SHOWN_WHY:]}"
        lines += [f"       {line}" for line in why.splitlines()]
    lines += [f"       {line}" for line in _figures(check["figures"])]
    lines += [f"       left out: {text}" for text in check["left_out"]]
    return lines


def _figures(figures: dict[str, Any]) -> list[str]:
    """Return a line for each figure that has a value, and one for each element of lists such as GPUs and runs."""
    lines = []
    for name, value in figures.items():
        several = value if isinstance(value, list) and value and isinstance(value[0], (dict, str)) else [value]
        lines += [f"{name}: {_text(each)}" for each in several if each not in (None, "", {}, [])]
    return lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}..."
