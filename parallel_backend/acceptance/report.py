"""A self-test's JSON as one page of text."""

from typing import Any

from .kit import FAILED, NOT_LOOKED_AT, PASSED

SHOWN_WHY = 700
"""Characters of a check's failures; the JSON has more."""
SHOWN_FIGURES = 6
SHOWN_TEXT = 120
"""Characters of a figure that is text, such as a rank's error."""
MARKS = {PASSED: "ok     ", FAILED: "FAILED ", NOT_LOOKED_AT: "-      "}


def describe(document: dict[str, Any]) -> str:
    """`document`: as document.document_of makes it."""
    summary = document["summary"]
    counts = ", ".join(f"{count} {status}" for status, count in summary.items())
    head = f"Parallel DiT {document['pack']} self-test, {document['date']}: {counts}; {document['seconds']:.0f} s"
    lines = [head, f"ranks on {', '.join(document['devices'])}"]
    for check in document["checks"]:
        lines += ["", *_check(check)]
    lines += ["", _end(summary)]
    return "\n".join(lines)


def verdict(document: dict[str, Any]) -> str:
    """Whether the self-test passed, in a line: "passed, 12 of 14 checks, 2 not looked at"."""
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
    figures = _system(check["figures"]) if check["name"] == "system" else _figures(check["figures"])
    lines += [f"       {line}" for line in figures]
    lines += [f"       left out: {text}" for text in check["left_out"]]
    return lines


def _system(figures: dict[str, Any]) -> list[str]:
    if not figures:
        return []
    libraries = ", ".join(f"{name} {version}" for name, version in figures["libraries"].items())
    gpus = [
        f"cuda:{index}: {gpu['name']}, capability {'.'.join(map(str, gpu['capability']))}, {_size(gpu['memory_bytes'])}"
        for index, gpu in enumerate(figures["gpus"])
    ]
    versions = [f"{name} {figures[name]}" for name in ("cuda", "rocm", "nccl", "driver") if figures[name]]
    lines = [f"{figures['platform']}, Python {figures['python']}, {libraries}", ", ".join([*versions, figures["transport"]])]
    lines += gpus
    if figures["peers"]:
        lines.append(
            "P2P: " + ", ".join(f"{pair} {'yes' if reached else 'no'}" for pair, reached in figures["peers"].items())
        )
    if figures.get("topology"):
        lines += ["  ".join(row) for row in figures["topology"]]
    lines += [f"hint: {hint}" for hint in figures["hints"]]
    return lines


def _figures(figures: dict[str, Any]) -> list[str]:
    """The first few plain figures, and one line for each link and run."""
    lines: list[str] = []
    plain = {name: value for name, value in figures.items() if not isinstance(value, (dict, list))}
    for name, value in list(plain.items())[:SHOWN_FIGURES]:
        lines.append(f"{name}: {_value(value)}")
    if len(plain) > SHOWN_FIGURES:
        numbers = [value for value in plain.values() if isinstance(value, (int, float))]
        lines.append(f"and {len(plain) - SHOWN_FIGURES} more figures, the largest of all {_value(max(numbers))}")
    for pair, link in figures.get("links", {}).get("between", {}).items():
        lines.append(f"{pair}: {link['GB_per_s']} GB/s, {link['us']} us")
    for run in figures.get("runs", []):
        peaks = ", ".join(_size(size) for size in run.get("peak_bytes", []))
        apart = f", {run['dB']} dB" if "dB" in run else ""
        lines.append(f"{run['mode']}: {run['seconds_per_step']} s a step{apart}{', peak ' * bool(peaks)}{peaks}")
    return lines


def _value(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}..."


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _end(summary: dict[str, int]) -> str:
    if summary[FAILED]:
        return "What to do about a failed check: docs/gpu.md. Please open an issue with the JSON."
    return "Please add the JSON to an issue: figures of machines with GPUs are what is missing most (docs/gpu.md)."
