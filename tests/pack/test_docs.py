"""Pages of the repository: every relative link resolves, and no page is long but those that a command makes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for room in ("docs", "web", "parallel_backend", "benchmarks") for page in (ROOT / room).rglob("*.md")),
    ]
)
LONGEST = 200
MADE = re.compile(r"\bmade by `([^`]+)`", re.IGNORECASE)
"""Stands in the first lines of a page that a command makes, in whole or in its tables."""
HEAD = 6
"""Lines."""
ELSEWHERE = re.compile(r"[a-z]+:")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The page without its examples: indented lines and fenced blocks."""
    without_fences = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    .*$", "", without_fences, flags=re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of links and pictures, without those to other places."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not ELSEWHERE.match(target)]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_resolves(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_the_chinese_readme_says_the_same():
    """By what needs no translation: where it leads, what is typed, figures, and the models."""
    pages = [ROOT / "README.md", ROOT / "README.zh.md"]
    english, chinese = (page.read_text(encoding="utf-8") for page in pages)
    assert sorted({*links(pages[0])} - {"README.zh.md"}) == sorted(
        {*links(pages[1])} - {"README.md", "docs/your-workflow.zh.md"}
    )
    for alike in (r"`([^`]+)`", r"\b\d+\.\d+\b", r"^(#+) ", r"^ +((?:bash|python) .*?)(?:  .*)?$"):
        assert sorted(re.findall(alike, english, re.MULTILINE)) == sorted(re.findall(alike, chinese, re.MULTILINE)), alike
    models = re.findall(r"[A-Z][\w-]+(?:\.\d)?", english[english.index("**Models**") : english.index("Other transformers")])
    assert {model for model in models if model not in chinese} == {"Models"}


def maker(page: Path) -> str | None:
    """The command that makes a page or its tables, as its first lines say."""
    said = MADE.search("\n".join(page.read_text(encoding="utf-8").splitlines()[:HEAD]))
    return said and said[1]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_is_long_but_those_that_a_command_makes(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST or maker(page)


def test_every_page_of_docs_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in links(index)}
    assert [name(page) for page in index.parent.glob("*.md") if page != index and page not in listed] == []


def decisions() -> dict[Path, list[tuple[int, str]]]:
    """Page of a topic -> number and text of each of its decisions."""
    sections = re.compile(r"^## (\d+)\. .*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    pages = [page for page in (ROOT / "docs" / "decisions").glob("*.md") if page.name != "README.md"]
    return {page: [(int(m[1]), m[0]) for m in sections.finditer(page.read_text(encoding="utf-8"))] for page in pages}


def test_decisions_that_are_cited_exist_and_are_on_the_linked_page():
    pages = decisions()
    numbers = {number: page for page, found in pages.items() for number, _ in found}
    cited = 0
    for page in PAGES:
        for number, link in re.findall(r"\[decision\s+(\d+)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link.partition("#")[0]).resolve() == numbers[int(number)], (page.name, number)
            cited += 1
    assert cited
    readers = [path for room in ("nodes", "parallel_backend", "tests") for path in (ROOT / room).rglob("*.py")]
    for path in [*readers, *PAGES]:
        for number in re.findall(r"\bdecision (\d+)", path.read_text(encoding="utf-8")):
            assert int(number) in numbers, (path.name, number)
