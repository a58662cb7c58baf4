"""Seconds from queueing a prompt to its first step, in a ComfyUI that has just started, beside slow text encoders.

    python -m benchmarks.speed.first_prompt --before PATH --out benchmarks/results/first_prompt_NAME_DATE.json

`--before`: another checkout of this pack, whose prompts take turns with this one's. The prompt is the quickstart's, with one
step of the bundled model on CPU ranks, whose text waits as if a GPU encoded it; the time ends with the prompt. Each is the
first of a ComfyUI, without ranks; `warm` are the next prompts of the same ComfyUI, with other words.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring
from scripts.comfyui_server import PACK, PACK_FOLDER, ComfyUIServer

TEXTS = (0.0, 5.0, 10.0, 20.0)
"""Seconds that the text takes."""
RANKS = (2, 4)
ANOTHER = 0.001
"""Seconds that make a text another one."""
WAITING_TEXT = PACK / "benchmarks" / "harness" / "waiting_text"


def prompt(ranks: int, seconds: float) -> dict[str, Any]:
    """The quickstart's prompt on so many ranks of a pipeline, with a text of so many seconds."""
    graph = json.loads((PACK / "workflows" / "api" / "quickstart.json").read_text())
    kinds = {node["class_type"]: name for name, node in graph.items()}
    loader = graph[kinds["ParallelDiTLoader"]]["inputs"]
    loader |= {"devices": ",".join(["cpu"] * ranks), "pipefusion_degree": ranks}
    sampler = graph[kinds["PipeFusionSampler"]]["inputs"]
    sampler["steps"] = 1
    for name in ("positive", "negative"):
        graph[name] = {"class_type": "WaitingText", "inputs": {"conditioning": sampler[name], "seconds": 0.0}}
        sampler[name] = [name, 0]
    graph["positive"]["inputs"]["seconds"] = seconds
    return graph


def prompts(checkout: Path, pack: Path, ranks: int, text: float) -> tuple[float, float]:
    """Seconds of the first prompt and of the next one, whose text is encoded anew."""
    with tempfile.TemporaryDirectory() as base:
        server = ComfyUIServer(checkout, Path(base), packs=(WAITING_TEXT,))
        server.packs[PACK_FOLDER] = pack
        with server:
            return timed(server, prompt(ranks, text)), timed(server, prompt(ranks, text + ANOTHER))


def timed(server: ComfyUIServer, asked: dict[str, Any]) -> float:
    began = time.monotonic()
    outcome = server.run(asked)
    assert outcome.status == "success", outcome.error
    return time.monotonic() - began


def run(rounds: int, say: Callable[[str], None], checkout: Path, packs: dict[str, Path]) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for ranks in RANKS:
            for text in TEXTS:
                case = f"{ranks} ranks, a text of {text:g} s"
                for name, pack in packs.items():
                    seconds = prompts(checkout, pack, ranks, text)
                    for kind, each in zip(("", ", warm"), seconds, strict=True):
                        found.setdefault(case + kind, {}).setdefault(name, []).append(each)
                    say(f"round {number + 1}, {case}, {name}: {seconds[0]:.1f} s, then {seconds[1]:.1f} s")
    return {
        "what": "first_prompt",
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "scope": "from the queue to the end of the first prompt of a ComfyUI, one step of the bundled model, seconds",
        "rounds": rounds,
        "cases": {
            case: {name: measuring.figure(values, 1) for name, values in each.items()} for case, each in found.items()
        },
    }


def main() -> None:
    options: argparse.ArgumentParser = measuring.parser(__doc__)
    options.set_defaults(rounds=3)
    options.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options.add_argument("--before", type=Path)
    given = options.parse_args()
    packs = {"now": PACK} if given.before is None else {"before": given.before.resolve(), "now": PACK}
    measuring.report(run(given.rounds, measuring.TimedLog(), given.comfyui.resolve(), packs), given.out)


if __name__ == "__main__":
    main()
