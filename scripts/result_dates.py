"""docs/results/dates.md: every committed result with its date, the commit that brought it, and the pages that show it.

python scripts/result_dates.py           writes the page, behind the commit of a new result
python scripts/result_dates.py --check   exits with 1 if the committed page lacks a result, or has one that is gone
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PAGE = DOCS / "results" / "dates.md"
HEAD = """# Dates of the results

Made by `python scripts/result_dates.py`. *Commit* brought the result: its code was measured, or that of a few commits
before. `git log --oneline COMMIT.. -- parallel_backend nodes` says what has changed since.

| date | result | commit | shown in |
|---|---|---|---|
"""
DATE = re.compile(r"\d{4}-\d\d-\d\d")
LINK = re.compile(r"\[[^\]]*\]\(\.\./\.\./benchmarks/results/([^)]+)\)")


def listed(page: Path) -> set[str]:
    """Names of the results that the page links to."""
    return set(LINK.findall(page.read_text(encoding="utf-8"))) if page.is_file() else set()


def results() -> list[Path]:
    """The newest first."""
    return sorted(sorted(RESULTS.glob("*.json")), key=date_of, reverse=True)


def date_of(path: Path) -> str:
    return DATE.findall(path.name)[-1]


def row(path: Path) -> str:
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", path], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    pages = [page for page in sorted(DOCS.rglob("*.md")) if page != PAGE and path.name in page.read_text(encoding="utf-8")]
    shown = ", ".join(f"[{page.stem}]({_from_here(page)})" for page in pages)
    return f"| {date_of(path)} | [{path.stem}](../../benchmarks/results/{path.name}) | {commit} | {shown} |"


def _from_here(page: Path) -> str:
    return page.name if page.parent == PAGE.parent else f"../{page.relative_to(DOCS).as_posix()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed page, and write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(HEAD + "\n".join(map(row, results())) + "\n", encoding="utf-8")
    elif listed(PAGE) != {path.name for path in results()}:
        sys.exit(f"{PAGE.name} has not all results: run python scripts/result_dates.py")


if __name__ == "__main__":
    main()
