"""benchmarks/results/compatibility.md, from the verdicts."""

from collections.abc import Iterable, Mapping, Sequence

from .runner import CORE, FAMILIES
from .verdict import BAD, CLOSE, NOT_THESE, NOT_TRIED, ORDER, Verdict, counts

START, END = "<!-- compatibility: python -m tests.campaigns.compatibility -->", "<!-- end of compatibility -->"
SHORT = 150
TITLES = {"flux": "Flux", "sd3": "SD3", "wan": "Wan"}
NOT = (NOT_THESE, NOT_TRIED)
SPOILT = "next prompt not right"


def replace_tables(page: str, tables: str) -> str:
    """The page with these tables between its markers."""
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{tables}\n{END}{after}"


def tables(verdicts: Sequence[Verdict], failed: Mapping[str, str], before: Sequence[Verdict]) -> str:
    """Markdown: the counts, and those of an earlier run; then a table of each pack, ComfyUI's own nodes first."""
    lines = ["| class | nodes |", "|---|---|", *_rows(counts(verdicts))]
    if before:
        keys = {(each.pack, each.node, each.family) for each in before}
        again = [each for each in verdicts if (each.pack, each.node, each.family) in keys]
        packs = ", ".join(sorted({f"{_title(each.pack)} ({TITLES[each.family]})" for each in before}))
        lines += ["", f"The same nodes before and after, of {packs}:", "", "| class | before | after |", "|---|---|---|"]
        lines += _rows(counts(before), counts(again))
    packs = sorted({verdict.pack for verdict in verdicts}, key=lambda pack: (pack != CORE, pack.lower()))
    for pack in packs:
        lines += [
            "",
            f"## {'ComfyUI' if pack == CORE else pack}",
            "",
            *_pack([each for each in verdicts if each.pack == pack]),
        ]
    for pack, why in sorted(failed.items()):
        lines += ["", f"## {pack}", "", f"It could not be loaded: {_short(why)}"]
    return "\n".join(lines)


def _rows(*found: Mapping[str, int]) -> list[str]:
    """A row of each class that there is, and of the prompts behind."""
    classes = [each for each in (*ORDER, SPOILT) if each == SPOILT or any(each in one for one in found)]
    return [f"| {' | '.join((each, *(str(one.get(each, 0)) for one in found)))} |" for each in classes]


def _title(pack: str) -> str:
    return "ComfyUI" if pack == CORE else pack


def _pack(verdicts: Iterable[Verdict]) -> list[str]:
    """A table of nodes. Those that are for none of these models, or were not tried, are a list behind it."""
    nodes: dict[str, dict[str, Verdict]] = {}
    for verdict in verdicts:
        nodes.setdefault(verdict.node, {})[verdict.family] = verdict
    shown = {
        name: families for name, families in nodes.items() if any(each.outcome not in NOT for each in families.values())
    }
    lines = [f"| node | {' | '.join(TITLES.values())} | |", f"|---|{'---|' * len(TITLES)}---|"] if shown else []
    for name, families in sorted(shown.items()):
        cells = [_cell(families.get(family)) for family in FAMILIES]
        lines.append(f"| {_escaped(name)} | {' | '.join(cells)} | {_word(families.values())} |")
    for outcome, said in ((NOT_THESE, "Not for these models, natively"), (NOT_TRIED, "Not tried")):
        rest = {name: families for name, families in sorted(nodes.items()) if name not in shown}
        of_these = [
            f"{_escaped(name)} ({_short(next(iter(families.values())).word, 80)})"
            for name, families in rest.items()
            if next(iter(families.values())).outcome == outcome
        ]
        if of_these:
            lines += ["", f"{said}: {'; '.join(of_these)}."]
    return lines


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.outcome in NOT:
        return "-"
    text = f"{CLOSE}, {verdict.psnr:.0f} dB" if verdict.outcome == CLOSE else verdict.outcome
    text = f"**{text}**" if verdict.outcome in BAD else text
    return f"{text}, **{SPOILT}**" if verdict.after else text


def _word(verdicts: Iterable[Verdict]) -> str:
    """That of the worst family that has one."""
    worst = sorted((each for each in verdicts if each.outcome not in NOT), key=lambda each: -ORDER.index(each.outcome))
    return next((_short(each.word) for each in worst if each.word), "")


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())


def _short(text: str, most: int = SHORT) -> str:
    text = _escaped(text).rstrip(".")
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."
