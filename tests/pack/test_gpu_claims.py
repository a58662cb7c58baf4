"""Pages agree on what has run on a GPU: docs/gpu.md has the sentences, and other pages use no other ones."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWNER = ROOT / "docs" / "gpu.md"
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md"), *(ROOT / "web" / "docs").glob("*.md")} - {OWNER})]
DONE = re.compile(r"\b(has|have|had|was|were|been)\b.*\b(run|ran|tried|tested|measured)\b", re.IGNORECASE)
HARDWARE = re.compile(r"\b(GPUs?|[Cc]ards?|H100|H200|CUDA|ROCm|WSL ?2|Windows)\b")
DENIAL = re.compile(r"\b(never|not|no|nor|none|only|yet|so far)\b", re.IGNORECASE)
RESULT = ROOT / "benchmarks" / "results" / "one_gpu_native_1xH100_2026-11-26.json"


def sentences(page: Path) -> list[str]:
    """Without emphasis, links and line breaks. Rows of tables, which have figures of their own, are left out."""
    text = re.sub(r"^ *\|.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = re.sub(r" ?\(\[[^\]]*\]\([^)]*\)\)", "", text).replace("**", "")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\n(?= *[^\s#-])(?! *[-#] )", " ", text)
    return [re.sub(r"^[-\s]+|\s+", " ", each).strip() for each in re.split(r"(?<=[.:])\s+|\n", text)]


def claims(page: Path) -> list[str]:
    return [each for each in sentences(page) if HARDWARE.search(each) and DONE.search(each) and DENIAL.search(each)]


def agreed() -> list[str]:
    listed = OWNER.read_text(encoding="utf-8").partition("## What has run on a GPU")[2].partition("\n- ")[2]
    return [each.replace("\n  ", " ") for each in listed.partition("\n\n")[0].split("\n- ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_says_what_the_list_says(page):
    assert [each for each in claims(page) if each not in agreed()] == []


def test_the_ratios_are_those_of_the_result():
    cases = json.loads(RESULT.read_text())["cases"]
    said = "one rank was as fast as ComfyUI's own model for Flux.1 and took {:.2f} times as long for Qwen-Image"
    assert abs(cases["flux-dev"]["ratio"] - 1) < 0.02
    assert any(said.format(cases["qwen-image"]["ratio"]) in each for each in agreed())
