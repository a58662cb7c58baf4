"""benchmarks/results/compatibility.md, from the verdicts."""

from collections.abc import Mapping, Sequence

from .runner import CORE, FAMILIES
from .verdict import BAD, CLOSE, NOT_THESE, NOT_TRIED, SPOILT, Verdict, counts

START, END = "<!-- compatibility: python -m tests.campaigns.compatibility -->", "<!-- end of compatibility -->"
SHORT = 150


def replace_tables(page: str, tables: str) -> str:
    """The page with these tables between its markers."""
    before, rest = page.split(START)
    return f"{before}{START}\n{tables}\n{END}{rest.split(END)[1]}"


def tables(verdicts: Sequence[Verdict], failed: Mapping[str, str]) -> str:
    """Markdown: the counts, then a table of each pack, ComfyUI's own nodes first."""
    lines = ["| class | nodes |", "|---|---|", *(f"| {name} | {count} |" for name, count in counts(verdicts).items())]
    packs = sorted({verdict.pack for verdict in verdicts}, key=lambda pack: (pack != CORE, pack.lower()))
    for pack in packs:
        lines += ["", f"## {'ComfyUI' if pack == CORE else pack}", ""]
        lines += [f"| node | {' | '.join(FAMILIES)} | |", f"|---|{'---|' * len(FAMILIES)}---|"]
        nodes: dict[str, dict[str, Verdict]] = {}
        for verdict in verdicts:
            if verdict.pack == pack:
                nodes.setdefault(verdict.node, {})[verdict.family] = verdict
        for name, found in sorted(nodes.items()):
            word = next((_short(each.word) for each in found.values() if each.word), "")
            cells = [_cell(found.get(family)) for family in FAMILIES]
            lines.append(f"| {_short(name)} | {' | '.join(cells)} | {word} |")
    for pack, why in sorted(failed.items()):
        lines += ["", f"## {pack}", "", f"It could not be loaded: {_short(why)}"]
    return "\n".join(lines)


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.outcome in (NOT_THESE, NOT_TRIED):
        return "-"
    text = f"{CLOSE}, {verdict.psnr:.0f} dB" if verdict.outcome == CLOSE else verdict.outcome
    text = f"**{text}**" if verdict.outcome in BAD else text
    return f"{text}, **{SPOILT}**" if verdict.after else text


def _short(text: str) -> str:
    text = " ".join(text.replace("|", "/").replace("<", "&lt;").split()).rstrip(".")
    return text if len(text) <= SHORT else text[:SHORT].rsplit(" ", 1)[0] + " ..."
