"""Runs parts one after the other, each in a process of its own under a time limit, and keeps what they found."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DONE, FAILED, CUT, LEFT_OUT = "done", "failed", "cut", "left out"
TAIL = 3000
"""Characters of a part's output that are kept if the part was not done."""
Results = dict[str, dict[str, Any]]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """`command`: arguments of Python, "{out}" instead of the part's JSON; a part of pytest writes "{xml}" instead.
    `seconds`: its limit. `lacks`: why this machine cannot run the part; empty if it can."""

    name: str
    seconds: float
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: str = ""


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    seconds: float,
    found: Callable[[Results], None],
    say: Callable[[str], None] = lambda text: None,
) -> Results:
    """Part -> what came of it. `found` gets the same of all parts so far after each part. `seconds`: the limit of all parts
    together: a part that has less than its limit left is run with that."""
    folder.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    deadline = time.monotonic() + seconds
    for part in parts:
        left = deadline - time.monotonic()
        lacks = part.lacks or ("" if left >= min(5.0, part.seconds) else "no time is left for it")
        results[part.name] = one = {"status": LEFT_OUT, "why": lacks} if lacks else run_part(part, folder, left)
        found(results)
        say(f"{part.name}: {one['status']}, {one.get('summary') or one.get('why', '')}".rstrip(", "))
    return results


def run_part(part: Part, folder: Path, left: float) -> dict[str, Any]:
    """What came of the part: its status, seconds, and the JSON that it wrote, also if it was cut after that."""
    stem = part.name.replace(" ", "_").replace(",", "")
    out, xml, log = (folder / f"{stem}.{ending}" for ending in ("json", "xml", "log"))
    for file in (out, xml):
        file.unlink(missing_ok=True)
    command = [argument.replace("{out}", str(out)).replace("{xml}", str(xml)) for argument in part.command]
    limit, started = min(part.seconds, left), time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | dict(part.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
            status, why = (DONE, "") if code == 0 else (FAILED, f"it ended with {code}")
        except subprocess.TimeoutExpired:
            status, why = CUT, f"it took longer than its {limit:.0f} s"
        finally:
            _end(process)  # also what a part that has ended left behind, such as a rank
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1), "limit": part.seconds}
    written = _read_tests(xml) if xml.exists() else _read(out)
    result |= {"why": why} if why else {}
    if written is not None:
        result |= {"summary": written.get("summary", ""), "result": written}
        if status == DONE and (lacks := written.get("lacks")):
            result |= {"status": LEFT_OUT, "why": lacks}
    if status != DONE:
        result["output"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
    return result


def _end(process: subprocess.Popen) -> None:
    """Kill the process and all that it started: they are the only ones of its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _read(out: Path) -> dict[str, Any] | None:
    """None: the part wrote nothing, or was cut while it wrote."""
    try:
        return json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _read_tests(xml: Path) -> dict[str, Any]:
    """Counts of pytest's tests, and what those that failed or were skipped said."""
    suite = ElementTree.parse(xml).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, "0")) for name in ("failures", "errors", "skipped")}
    total = len(suite.findall("testcase"))
    said = {
        f"{case.get('classname')}::{case.get('name')}": (outcome.get("message") or "")[:300]
        for case in suite
        for outcome in case
        if outcome.tag in ("failure", "error", "skipped")
    }
    result = {"summary": f"{total - sum(counts.values())} of {total} tests passed", **counts, "said": said}
    if total and counts["skipped"] == total:
        result["lacks"] = f"all tests were skipped: {next(iter(said.values()))}"
    return result
