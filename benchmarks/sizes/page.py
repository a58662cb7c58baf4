"""docs/results/real_sizes_modes.md, and the table beside ComfyUI's own classes in real_sizes.md: table.py's newest result.

python -m benchmarks.sizes.page
"""

import json
from pathlib import Path
from typing import Any

from testing.real_sizes import REAL_MODELS

from .table import cases

ROOT = Path(__file__).resolve().parents[2]
PAGES, RESULTS = ROOT / "docs" / "results", ROOT / "benchmarks" / "results"
GB = 1e9
MODES_HEAD = """# Real sizes in every mode

Made by `python -m benchmarks.sizes.page` from a [result](../../benchmarks/results/{}), which has every rank and every link.
What the columns say, and how they were found: [real sizes without memory](real_sizes.md). PipeFusion has as many patches as
stages. bf16, torch's attention; MiniMax H3 is the plain model. *Patch* is displaced patches.

"""
NATIVE = "<!-- native: python -m benchmarks.sizes.page -->", "<!-- end of native -->"
ALL_RANKS = (1, 2, 4, 8)


def newest() -> Path:
    return max(RESULTS.glob("real_sizes_2*.json"))


def modes_table(result: dict[str, Any]) -> str:
    """A line for each model and mode, with the rank that takes most."""
    lines = [
        "| model, mode | GB of a run, traced | predicted | kernels a step | of them products | GB moved | stops | GB sent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, _, _ in cases(list(REAL_MODELS), ALL_RANKS):
        if key not in result["cases"]:
            continue
        ranks = result["cases"][key]["ranks"]
        most = max(ranks, key=lambda rank: rank["peak"])
        sent = max(sum(size for name, size in rank.items() if _is_rank(name)) for rank in ranks)
        lines.append(
            f"| {key} | {most['peak'] / GB:.2f} | {most['predicted'] / GB:.2f} | {most['kernels']:,} | "
            f"{most['products']:,} | {most['moved'] / GB:,.0f} | {most['stops']} | {sent / GB:.2f} |"
        )
    return "\n".join(lines)


def _is_rank(name: str) -> bool:
    return name.removeprefix("to ").isdigit()


def native_table(result: dict[str, Any]) -> str:
    """One rank over ComfyUI's own class, and the operations of the rank that move most."""
    lines = [
        "| model | kernels: native | one rank | ratio | GB moved: native | one rank | ratio | what moves most, GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, native in result["native"].items():
        case = result["cases"][f"{name}, one rank"]
        (rank,) = case["ranks"]
        most = ", ".join(f"{each} {moved / GB:,.0f}" for each, (_, moved) in list(case["by name"].items())[:4])
        lines.append(
            f"| {name} | {native['kernels']:,} | {rank['kernels']:,} | {rank['kernels'] / native['kernels']:.2f} | "
            f"{native['moved'] / GB:,.0f} | {rank['moved'] / GB:,.0f} | {rank['moved'] / native['moved']:.2f} | {most} |"
        )
    return "\n".join(lines)


def with_native_table(text: str, result: dict[str, Any]) -> str:
    before, rest = text.split(NATIVE[0])
    _, after = rest.split(NATIVE[1])
    return f"{before}{NATIVE[0]}\n{native_table(result)}\n{NATIVE[1]}{after}"


def main() -> None:
    path, page = newest(), PAGES / "real_sizes.md"
    result = json.loads(path.read_text())
    page.write_text(with_native_table(page.read_text(), result))
    (PAGES / "real_sizes_modes.md").write_text(f"{MODES_HEAD.format(path.name)}{modes_table(result)}\n")


if __name__ == "__main__":
    main()
