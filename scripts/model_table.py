"""The table of memory and speed in docs/models.md: what the planner says of models and cards that are not there.

    python scripts/model_table.py

Writes it between the markers of docs/models.md. No file and no device is needed (benchmarks/predictions/presets.py).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.predictions.presets import BF16, HARDWARE, MODELS  # noqa: E402
from parallel_backend.core.degrees import Degrees  # noqa: E402
from parallel_backend.placement.residency import GB  # noqa: E402
from parallel_backend.planning.calibrated_costs import CalibratedCosts  # noqa: E402
from parallel_backend.planning.modes import Mode  # noqa: E402
from parallel_backend.planning.planner import advise, plan  # noqa: E402
from parallel_backend.planning.prediction import predict  # noqa: E402

START, END = "<!-- memory and speed: scripts/model_table.py -->", "<!-- end of memory and speed -->"
CARDS = ("RTX 4090", "RTX 3090")
RUNS = {  # preset -> (width, height, steps, what is made)
    "z-image": (1024, 1024, 8, "image, 1024 x 1024"),
    "flux-dev": (1024, 1024, 20, "image, 1024 x 1024"),
    "flux2-dev": (1024, 1024, 20, "image, 1024 x 1024"),
    "krea-2": (1024, 1024, 8, "image, 1024 x 1024"),
    "qwen-image": (1024, 1024, 20, "image, 1024 x 1024, two prompts"),
    "qwen-image-2.1": (1024, 1024, 25, "image, 1024 x 1024"),
    "wan-2.2-14b": (640, 640, 20, "5 s, 640 x 640, two prompts; one expert"),
    "ltx-2.3": (1280, 704, 8, "5 s, 1280 x 704"),
    "minimax-h3": (864, 480, 20, "5 s, 864 x 480, pruned"),
}
PACKED = 1
"""Bytes of a weight in fp8 or int8."""


def preset(card: str, count: int) -> str:
    """Two GPUs as in a desktop, on 8 lanes each. Four as in a workstation, on 16."""
    return card if count <= 2 else f"{card} x16"


def costs(name: str, card: str, count: int, weight_bytes: int) -> CalibratedCosts:
    width, height, steps, _ = RUNS[name]
    model = MODELS[name]
    workload = model.workload(name, height, width, steps, weight_bytes=weight_bytes)
    return CalibratedCosts(HARDWARE[preset(card, count)].calibration(count, model), workload)


def memory(name: str, count: int, weight_bytes: int) -> tuple[float, float]:
    """(GB of the fullest card of a pipeline without PipeFusion's K/V buffers, GB of those)."""
    found = predict(costs(name, CARDS[0], count, weight_bytes), Mode(Degrees(pipe=count), count))
    fullest = max(found.memory, key=lambda need: need.total)
    return (fullest.total - fullest.buffers) / GB, fullest.buffers / GB


def fastest(name: str, card: str, count: int, exact: bool) -> str:
    """Seconds of a step in the fastest mode, or in the fastest exact one, with a star for packed weights and a plus where
    weights are streamed."""
    found = []
    for weight_bytes, packed in ((BF16, ""), (PACKED, "*")):
        planned = plan(costs(name, card, count, weight_bytes), [count]).predictions
        fit = [each for each in planned if (each.mode.device is None) == (count > 1) and (each.mode.exact or not exact)]
        best = advise(fit)
        found += [(best, packed + "+" * bool(best.most_streamed))] if best is not None else []
    best, marks = min(found, key=lambda each: each[0].seconds)
    return f"{best.seconds / RUNS[name][2]:.2f}{marks}"


def speed(name: str, card: str) -> str:
    """Seconds of a step on 1, 2 and 4 cards, with the fastest exact mode's in brackets."""
    shared = (f"{fastest(name, card, count, False)} ({fastest(name, card, count, True)})" for count in (2, 4))
    return " / ".join((fastest(name, card, 1, True), *shared))


def table() -> str:
    lines = [
        "| model | what is made | GB a GPU, bf16: 2, 4 | fp8 or int8: 2, 4 | PipeFusion's buffers: 2, 4 | "
        + " | ".join(f"seconds a step, {card}: 1, 2, 4" for card in CARDS)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(CARDS),
    ]
    for name, (*_, made) in RUNS.items():
        needs = {each: [memory(name, count, each) for count in (2, 4)] for each in (BF16, PACKED)}
        sizes = [", ".join(f"{need:.0f}" for need, _ in needs[each]) for each in (BF16, PACKED)]
        sizes.append(", ".join(f"{buffers:.1f}" for _, buffers in needs[BF16]))
        lines.append(f"| {name} | {made} | " + " | ".join((*sizes, *(speed(name, card) for card in CARDS))) + " |")
    return "\n".join(lines)


def main() -> None:
    page = ROOT / "docs" / "models.md"
    before, rest = page.read_text().split(START)
    _, after = rest.split(END)
    page.write_text(f"{before}{START}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
