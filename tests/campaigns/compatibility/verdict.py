"""What a trial's facts amount to: classes, per mode, per model and per node."""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

LIMIT, TIMES = 5e-5, 10.0
"""Largest difference of a result, of its largest value: this, or so many times what the native model differs from itself
when it attends by another of ComfyUI's kernels."""
NOTHING = 5e-6
"""A native result this near to that without the node is the same."""
FAR = 25.0
"""dB. A pipelined run that is further from the native one is another picture."""
EQUAL, CLOSE, WHOLE, REFUSED, UNNAMED = "equal", "close", "whole", "refused", "refused without its name"
NO_EFFECT, WRONG, CRASH, HANG = "no effect", "wrong", "crash", "hang"
NOT_THESE, NOT_TRIED = "not for these models", "not tried"
ORDER = (NOT_TRIED, NOT_THESE, NO_EFFECT, EQUAL, CLOSE, WHOLE, REFUSED, UNNAMED, WRONG, CRASH, HANG)
"""From best to worst: a node is what it is in its worst mode and model. Those that say nothing come first."""
SPOILT = "next prompt not right"
BAD = (UNNAMED, WRONG, CRASH, HANG)
NATIVE, MODES = "native", ("ulysses", "split batch", "full warm-up", "one warm-up")
GENERAL = {"node", "apply", "advanced", "model", "patch", "simple", "di", "t"}
"""Words that a node's name may have beside those that a refusal must have."""


@dataclass
class Verdict:
    """A node with one model's model.

    `modes`: mode -> class. `psnr`: dB, pipelined. `word`: of the worst mode. `after`: what became of the next prompt where
    that was not right.
    """

    pack: str
    node: str
    title: str
    model: str
    outcome: str
    modes: dict[str, str] = field(default_factory=dict)
    word: str = ""
    difference: float | None = None
    psnr: float | None = None
    after: str = ""

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "", {})}


def judge(about: tuple[str, str, str, str], trials: dict[str, dict[str, Any]], own: str = "") -> Verdict:
    """`about`: pack, node, title, model. `trials`: mode -> what inside/compatibility.py told, or "died": how. `own`: the
    name of the node's class.

    A difference from the node that has no effect natively is an effect of its own, and as wrong as any.
    """
    names = (*about[1:3], re.sub(r"\(.*?\)", "", about[2]), own)
    native = trials[NATIVE]
    if "died" in native:
        return Verdict(*about, NOT_THESE, word=f"native: {native['died']}")
    told = native["outcome"]
    if "missing" in told:
        return Verdict(*about, NOT_TRIED, word=f"nothing here stands in for {told['missing']}")
    if "error" in told:
        return Verdict(*about, NOT_THESE, word=f"native: {last_line(told['error'])}")
    if not told["finite"]:
        return Verdict(*about, NOT_THESE, word="native: not finite")
    judged = {mode: in_mode(trials[mode], names) for mode in MODES if mode in trials}
    outcomes = {mode: outcome for mode, (outcome, _) in judged.items()}
    worst = max(outcomes.values(), key=ORDER.index, default=NOT_TRIED)
    word = next((word for outcome, word in judged.values() if outcome == worst and word), "")
    if worst in (EQUAL, CLOSE, WHOLE) and told["effect"] is not None and told["effect"] <= NOTHING:
        worst = NO_EFFECT
    results = {mode: trial.get("outcome", {}) for mode, trial in trials.items()}
    differences = [result["difference"] for mode, result in results.items() if mode in MODES[:3] and "difference" in result]
    return Verdict(
        *about,
        worst,
        outcomes,
        word,
        max(differences, default=None),
        results.get(MODES[3], {}).get("psnr") if outcomes.get(MODES[3]) == CLOSE else None,
        "; ".join(f"{mode}: {said}" for mode in MODES if mode in trials and (said := after(trials[mode]))),
    )


def in_mode(trial: dict[str, Any], names: Iterable[str]) -> tuple[str, str]:
    """(class, word)."""
    if "died" in trial:
        return (HANG if "Timeout" in trial["died"] else CRASH), trial["died"]
    told = trial["outcome"]
    if "error" in told:
        error = told["error"]
        if error["ours"] and (error["type"] == "ValueError" or error["text"].startswith("model: ")):  # hasattr's error too
            return (REFUSED if is_named(error["text"], names) else UNNAMED), error["text"].splitlines()[0]
        return CRASH, last_line(error)
    if "missing" in told:
        return NOT_TRIED, told["missing"]
    whole = told.get("whole")
    equal = math.isfinite(told["difference"]) and told["difference"] <= max(LIMIT, TIMES * told.get("itself", 0.0))
    if equal:
        return (WHOLE, whole) if whole else (EQUAL, "")
    if trial["mode"] == MODES[3] and not whole and told["psnr"] is not None and told["psnr"] >= FAR:
        return CLOSE, ""
    return WRONG, f"{trial['mode']}: {told['difference']:.1e} of the largest value"


def after(trial: dict[str, Any]) -> str:
    """What became of the next prompt. Empty: it was right."""
    told = trial.get("after")
    if told is None or told.get("difference", math.inf) <= LIMIT:
        return ""
    return last_line(told["error"]) if "error" in told else f"{told['difference']:.1e} off"


def last_line(error: dict[str, Any]) -> str:
    lines = error["text"].strip().splitlines() or [""]
    return f"{error['type'].rpartition('.')[2]}: {lines[0] if len(lines[0]) > 20 else ' '.join(lines[:2])}"


def is_named(text: str, names: Iterable[str]) -> bool:
    """A refusal names its node: by one of the names, or by every word of it that is the node's own."""
    said = _letters(text)
    for name in filter(_letters, names):
        words = [
            word for word in map(str.lower, re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)) if word not in GENERAL
        ]
        if _letters(name) in said or (len(words) > 1 and all(word in said for word in words)):
            return True
    return False


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Class -> nodes, each counted once, by its worst model; and the next prompts that were not right."""
    worst: dict[tuple[str, str], Verdict] = {}
    spoilt = set()
    for verdict in verdicts:
        key = (verdict.pack, verdict.node)
        if key not in worst or ORDER.index(verdict.outcome) > ORDER.index(worst[key].outcome):
            worst[key] = verdict
        if verdict.after:
            spoilt.add(key)
    found = {outcome: sum(verdict.outcome == outcome for verdict in worst.values()) for outcome in ORDER}
    return {outcome: count for outcome, count in found.items() if count} | {SPOILT: len(spoilt)}
