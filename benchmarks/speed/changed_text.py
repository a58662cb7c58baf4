"""Seconds to the first step of a prompt whose text has changed: the text encoder and the first of two ranks share a card.

    python -m benchmarks.speed.changed_text --out benchmarks/results/changed_text_NAME_DATE.json
    python -m benchmarks.speed.changed_text --either 150 --out benchmarks/results/changed_text_streamed_NAME_DATE.json
    python -m benchmarks.speed.changed_text --prompts 200 --out benchmarks/results/changed_text_soak_NAME_DATE.json

Cards are emulated: ranks have a budget of bytes for weights, and copies from host memory take their time. ComfyUI's own
model management decides who gives way on the first card, whose memory is a figure to it. The same prompts are run with room
for both encoder and rank, and with room for either (with less than a stage needs, it is streamed even alone); nothing can
be read from the model's file after the first prompt. The wanted line: what giving way adds is at most the time to copy the
weights back, and half a second. With many prompts also how much the processes have grown: the last quarter of the prompts
beside the second.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring
from scripts.comfyui_server import find_python
from testing import mini

MODEL = mini.IN_COMFYUI | {"width": 512, "single_blocks": 10}
"""246 MB in fp32."""
LAYERS = 90
"""Of a text encoder of 59 MB."""
BOTH, EITHER = 250, 170
"""MB of a card that has room for both, and for either. The first rank's weights take 139 MB, and at run time 18 MB beside
them are kept free."""
RATE = 1e8
SIDE = 32
MODES = {"pipefusion": {"pipe": 2}, "tensor": {"pipe": 1, "tensor": 2}}
ALLOWED = 0.5
"""Seconds beside the copy."""


def inside(checkout: Path, base: Path, ask: dict[str, Any]) -> dict[str, Any]:
    """What harness/inside_changed_text.py answers in a ComfyUI of its own. RuntimeError with its log where it does not."""
    script = Path(measuring.__file__).with_name("inside_changed_text.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [find_python(checkout), script, checkout, base],
        cwd=base,
        env=environment,
        input=json.dumps(ask) + "\n",
        capture_output=True,
        text=True,
    )
    if not ran.stdout:
        raise RuntimeError(f"ComfyUI ended:\n{ran.stderr[-8000:]}")
    return json.loads(ran.stdout)


def row(found: dict[str, Any]) -> dict[str, Any]:
    """Of the prompts behind the first. "added": beside the same prompt with room for both. CPU seconds: of all processes."""
    both, either = (found["cases"][case][1:] for case in ("both", "either"))
    added = [ours["seconds"] - theirs["seconds"] for ours, theirs in zip(either, both, strict=True)]
    cards = [prompt["on_the_cards"] for prompt in either]
    back = [prompt["back"] / RATE for prompt in either]
    cpu = [ours["cpu_seconds"] - theirs["cpu_seconds"] for ours, theirs in zip(either, both, strict=True)]
    beyond = [more - copy for more, copy in zip(added, back, strict=True)]
    return {
        "seconds_with_room_for_both": measuring.figure([prompt["seconds"] for prompt in both]),
        "seconds_with_room_for_either": measuring.figure([prompt["seconds"] for prompt in either]),
        "of_these_the_encoder": measuring.figure([prompt["encoder_seconds"] for prompt in either]),
        "handed_over_MB": [round((before[0] - during[0]) / 1e6, 1) for before, during, _ in cards],
        "handed_over_by_the_other_rank_MB": [round((before[1] - during[1]) / 1e6, 1) for before, during, _ in cards],
        "brought_back_MB": [round(prompt["back"] / 1e6, 1) for prompt in either],
        "copy_back_seconds": measuring.figure(back),
        "added_seconds": measuring.figure(added),
        "beyond_the_copy": measuring.figure(beyond),
        "added_cpu_seconds": measuring.figure(cpu),
        "kept": statistics.median(beyond) <= ALLOWED,
        "all_back": all(after == before for before, _, after in cards),
        "same_pictures": found["equal"],
        "growth": growth([prompt["memory"] for prompt in either]),
    }


def growth(memory: list[list[int]]) -> list[float]:
    """By process, ComfyUI first: how much its median over the last quarter of the prompts is above that over the second."""
    quarter = max(1, len(memory) // 4)
    early, late = memory[quarter : 2 * quarter], memory[-quarter:]
    medians = [[statistics.median(column) for column in zip(*part, strict=True)] for part in (early, late)]
    return [round(last / first - 1, 4) for first, last in zip(*medians, strict=True)]


def run(checkout: Path, prompts: int, either: int) -> dict[str, Any]:
    stolen, cases = measuring.Stolen(), {}
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        folder = base / "models" / "diffusion_models"
        folder.mkdir(parents=True)
        mini.save(mini.random_model(MODEL), folder / "model.safetensors")
        common = {
            "file": "model.safetensors",
            "sizes": {"both": BOTH * 10**6, "either": either * 10**6},
            "layers": LAYERS,
            "rate": RATE,
            "side": SIDE,
            "prompts": prompts,
        }
        for mode, degrees in MODES.items():
            cases[mode] = row(inside(checkout, base, common | {"degrees": degrees}))
    return {
        "what": "changed_text",
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(("cpu",)),
        "scope": "ComfyUI's process, from before the encoder is loaded to the end of the first step; emulated cards, "
        f"{RATE / 1e6:.0f} MB/s; two CPU ranks, one thread each; no VAE",
        "card_with_room_for_either_MB": either,
        "prompts": prompts,
        "stolen": stolen.share(),
        "load_average": round(os.getloadavg()[1], 1),
        "cases": cases,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--comfyui", type=Path, default=Path(os.environ.get("COMFYUI_PATH") or Path.home() / "ComfyUI"))
    options.add_argument("--prompts", type=int, default=6)
    options.add_argument("--either", type=int, default=EITHER, help="MB of the card that has room for either")
    options.add_argument("--out", type=Path, help="a JSON file")
    given = options.parse_args()
    measuring.report(run(given.comfyui, given.prompts, given.either), given.out)


if __name__ == "__main__":
    main()
