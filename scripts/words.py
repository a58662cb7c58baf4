"""Counts what a machine can see of bad English in pages, tooltips, messages and docstrings. The counts may only fall.

python scripts/words.py           fails if a habit is found more often than scripts/words.json says
python scripts/words.py --list    prints each place
python scripts/words.py --shrink  writes the smaller counts
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "scripts" / "words.json"
LONGEST = 25
"""Words of a sentence."""
HABITS = {
    "'picture' for an image": r"\bpictures?\b",
    "'card' for a GPU": r"\bcards?\b",
    "'sound' for audio": r"\bsounds?\b",
    "'where' for a condition": r"[^(], where\b",
    "'what' in place of a noun": r"\b(?:of|from|by|than|as|with) what\b",
    "'of which', 'so is', 'so are'": r"\bof which\b|\bso (?:is|are)\b",
    "'is no' for 'is not a'": r"(?<!there )\b(?:is|are) no (?!longer|larger|more|rounding)[a-z]",
    "'anew', 'nobody', 'at hand'": r"\banew\b|\bnobody\b|\bat hand\b",
}
CHINESE = "Chinese: not one of the list's words"
CHINESE_FORM = r"画面|图块|您|块(?:显卡|卡)|代替 KSampler"
"""See CONTRIBUTING.md, Style."""


def texts() -> Iterator[tuple[str, str]]:
    """(file, a paragraph, docstring or message) of all that a reader of English meets."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("web/docs/*.md")]:
        if not page.name.endswith("zh.md"):
            kept = re.sub(r"(?s:```.*?```)|^(?:    |\|).*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
            yield from (
                (page.relative_to(ROOT).as_posix(), part) for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )", kept)
            )
    for path in [*ROOT.glob("nodes/**/*.py"), *ROOT.glob("parallel_backend/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
                yield path.relative_to(ROOT).as_posix(), text
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
                yield path.relative_to(ROOT).as_posix(), node.value


def habits_of(text: str) -> Iterator[tuple[str, str]]:
    """(habit, sentence) of an English text. Code and links do not count."""
    for sentence in re.split(r"(?<=[.:;!?])\s+", re.sub(r"`[^`]*`|\]\([^)]*\)", "x", text)):
        if len(re.findall(r"[A-Za-z][\w'-]*", sentence)) > LONGEST:
            yield f"sentences above {LONGEST} words", sentence
        yield from ((habit, sentence) for habit, form in HABITS.items() if re.search(form, sentence))


def found() -> Iterator[tuple[str, str, str]]:
    """(habit, file, sentence)."""
    for file, text in texts():
        yield from ((habit, file, sentence) for habit, sentence in habits_of(text))
    for pattern in ("*zh.md", "docs/*zh.md", "web/docs/*/zh.md", "locales/zh/*.json"):
        for path in ROOT.glob(pattern):
            for line in path.read_text(encoding="utf-8").splitlines():
                if re.search(CHINESE_FORM, line):
                    yield CHINESE, path.relative_to(ROOT).as_posix(), line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each place")
    parser.add_argument("--shrink", action="store_true", help="write the smaller counts")
    given = parser.parse_args()
    places = list(found())
    if given.list:
        print(*(f"{file}: {habit}: {' '.join(sentence.split())}" for habit, file, sentence in places), sep="\n")
    counts = Counter(habit for habit, _, _ in places)
    limits: dict[str, int] = json.loads(LIMITS.read_text())
    if given.shrink:
        limits = {habit: min(limit, counts[habit]) for habit, limit in limits.items()}
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n")
    more = {habit: count for habit, count in counts.items() if count > limits.get(habit, 0)}
    for habit, count in more.items():
        print(f"words: {habit}: {count}, at most {limits.get(habit, 0)}: python scripts/words.py --list", file=sys.stderr)
    return int(bool(more))


if __name__ == "__main__":
    sys.exit(main())
