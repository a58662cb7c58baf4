"""benchmarks/results/templates.md, from the verdicts."""

from collections import Counter
from collections.abc import Sequence

from .runner import DIFFERS, EQUAL, FAILED, NOT_OURS, NOT_RUN, REFUSED, Verdict

START, END = "<!-- templates: python -m tests.campaigns.templates -->", "<!-- end of templates -->"
SHORT = 160


def summary(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """Outcome -> templates, uses, and the share of all uses."""
    uses = sum(verdict.uses for verdict in verdicts)
    count, used = Counter(verdict.outcome for verdict in verdicts), Counter()
    for verdict in verdicts:
        used[verdict.outcome] += verdict.uses
    order = (EQUAL, DIFFERS, REFUSED, FAILED, NOT_RUN, NOT_OURS)
    return {
        each: {"templates": count[each], "uses": used[each], "share": round(used[each] / max(uses, 1), 4)}
        for each in order
        if count[each]
    }


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: what the outcomes are, then every template, the most used first."""
    lines = ["| outcome | templates | uses | share of use |", "|---|---|---|---|"]
    for outcome, figures in summary(verdicts).items():
        lines.append(f"| {outcome} | {figures['templates']} | {figures['uses']} | {figures['share']:.1%} |")
    lines += ["", "| template | uses | outcome | |", "|---|---|---|---|"]
    for verdict in verdicts:
        said = f"{verdict.difference:.1e}" if verdict.difference is not None else shortened(verdict.reason)
        lines.append(f"| {verdict.name} | {verdict.uses} | {verdict.outcome} | {said} |")
    return "\n".join(lines)


def shortened(text: str) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= SHORT else text[: SHORT - 1].rsplit(" ", 1)[0] + " ..."


def replace_table(page: str, verdicts: Sequence[Verdict]) -> str:
    """The page with the table between its markers."""
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{table(verdicts)}\n{END}{after}"
