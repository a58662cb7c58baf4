"""The table of families in docs/results/families.md, from what tests measured.

    python -m pytest tests/families/test_families.py tests/comfyui/test_families.py \\
        --figures benchmarks/results/families_DATE.json
    python scripts/family_table.py benchmarks/results/families_*.json

Writes the table between the markers of docs/results/families.md; where files have the same figure, the last one's. A case
without a figure has not been measured, and is left out.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from testing.cases import all_cases  # noqa: E402

START, END = "<!-- families: scripts/family_table.py -->", "<!-- end of families -->"


def row(case, figures: dict[str, float]) -> str | None:
    exact = figures.get(f"relative error of exact calls, {case.name}")
    if exact is None:
        return None
    warm = figures.get(f"relative error of PipeFusion's warm-up, {case.name}")
    native = figures.get(f"ComfyUI parity, largest difference, {case.name}")
    cells = (
        case.name,
        f"{exact:.1e}",
        f"{warm:.1e}" if warm is not None else "not measured",
        case.notes.get("native", "not measured") if native is None else f"{native:.1e}",
    )
    return "| " + " | ".join(cells) + " |"


def table(figures: dict[str, float]) -> str:
    head = (
        "| family | exact modes against the class | PipeFusion's warm-up | KSampler against ComfyUI's own model |",
        "|---|---|---|---|",
    )
    rows = [row(case, figures) for case in all_cases()]
    return "\n".join((*head, *(line for line in rows if line is not None)))


def main() -> None:
    page = ROOT / "docs" / "results" / "families.md"
    before, rest = page.read_text().split(START)
    _, after = rest.split(END)
    figures = {}
    for path in sys.argv[1:]:
        figures |= json.loads(Path(path).read_text())
    page.write_text(f"{before}{START}\n{table(figures)}\n{END}{after}")


if __name__ == "__main__":
    main()
