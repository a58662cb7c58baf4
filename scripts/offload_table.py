"""Prints which weights two GPUs stream if they do not hold the model, and what that costs.

    python scripts/offload_table.py

Predicted, not measured. No file and no device is needed (benchmarks/predictions/presets.py).
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.predictions.presets import BF16, HARDWARE, MODELS  # noqa: E402
from parallel_backend.placement.residency import GB  # noqa: E402
from parallel_backend.planning.calibrated_costs import CalibratedCosts  # noqa: E402
from parallel_backend.planning.planner import choose, plan  # noqa: E402
from parallel_backend.planning.prediction import Prediction  # noqa: E402
from scripts.model_table import PACKED, RUNS  # noqa: E402

CARDS = ("RTX 4080", "RTX 3090")
COUNT = 2
CONTEXTS = 1 * GB
"""Of a card's memory, for the processes of ComfyUI and of a rank."""
ENDLESS = 10**15


def best(name: str, card: str, weight_bytes: int, memory: int) -> Prediction:
    """What `degrees` auto takes on two such cards with so many bytes each, under a sampler that pipelines."""
    width, height, steps, _ = RUNS[name]
    hardware = replace(HARDWARE[card], gpu=replace(HARDWARE[card].gpu, memory=memory))
    workload = MODELS[name].workload(name, height, width, steps, weight_bytes=weight_bytes)
    costs = CalibratedCosts(hardware.calibration(COUNT, MODELS[name]), workload)
    found = plan(costs, [COUNT])
    return choose(replace(found, predictions=tuple(each for each in found.predictions if each.mode.device is None)))


def cells(name: str, card: str, weight_bytes: int) -> str:
    """Mode, GB streamed by the card that streams most, seconds a step, how many times as long as with all on the cards."""
    found = best(name, card, weight_bytes, HARDWARE[card].gpu.memory - CONTEXTS)
    if found.lacks:
        return "does not fit | | | "
    whole = best(name, card, weight_bytes, ENDLESS)
    streamed = f"{found.most_streamed / GB:.1f}" if found.most_streamed else "0"
    return f"{found.mode} | {streamed} | {found.seconds / RUNS[name][2]:.2f} | {found.seconds / whole.seconds:.2f}"


def table() -> str:
    heads = " | ".join(f"{COUNT} x {card}, {HARDWARE[card].gpu.memory // GB} GB | GB | s | x" for card in CARDS)
    lines = [f"| model | what is made | GB | {heads} |", "|---|---|---|" + "---|" * 4 * len(CARDS)]
    for name, (*_, made) in RUNS.items():
        for weight_bytes, kind in ((BF16, "bf16"), (PACKED, "fp8, int8")):
            size = (MODELS[name].weights * weight_bytes + MODELS[name].others * BF16) / GB
            columns = " | ".join(cells(name, card, weight_bytes) for card in CARDS)
            lines.append(f"| {name}, {kind} | {made} | {size:.0f} | {columns} |")
    return "\n".join(lines)


def main() -> None:
    print(table())


if __name__ == "__main__":
    main()
