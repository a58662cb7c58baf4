"""The tables of docs/results/real_sizes.md, from the newest result of table.py.

python -m benchmarks.sizes.page
"""

import json
from pathlib import Path
from typing import Any

from testing.real_sizes import REAL_MODELS

from .table import cases

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "results" / "real_sizes.md", ROOT / "benchmarks" / "results"
GB = 1e9
MODES = "<!-- modes: python -m benchmarks.sizes.page -->", "<!-- end of modes -->"
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


def page(text: str, result: dict[str, Any]) -> str:
    for (start, end), made in ((MODES, modes_table(result)), (NATIVE, native_table(result))):
        before, rest = text.split(start)
        _, after = rest.split(end)
        text = f"{before}{start}\n{made}\n{end}{after}"
    return text


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(), json.loads(newest().read_text())))


if __name__ == "__main__":
    main()
