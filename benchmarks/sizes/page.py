"""The table beside ComfyUI's own classes in docs/results/real_sizes.md: table.py's newest result.

python -m benchmarks.sizes.page
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES, RESULTS = ROOT / "docs" / "results", ROOT / "benchmarks" / "results"
GB = 1e9
NATIVE = "<!-- native: python -m benchmarks.sizes.page -->", "<!-- end of native -->"


def newest() -> Path:
    return max(RESULTS.glob("real_sizes_2*.json"))


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
    page, result = PAGES / "real_sizes.md", json.loads(newest().read_text())
    page.write_text(with_native_table(page.read_text(), result))


if __name__ == "__main__":
    main()
