"""Milliseconds of a rank's CPU for a step by ComfyUI's own class and by the family that an earlier commit has, in turn.

    git worktree add /tmp/families afc9dc53^
    ~/ComfyUI/.venv/bin/python benchmarks/sizes/beside_families /tmp/families OUT.json krea-2 ltx-2.3 minimax-h3 qwen-image

Small files with the published numbers of blocks, one thread. The messages of a run on CPU ranks in threads are handled once
more by a worker whose transfers move nothing (benchmarks/one_gpu/host_time.py), in a process for each side.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from cases import MODES

ROUNDS = 8
HERE = Path(__file__).parent
families, out, *names = sys.argv[1:]


def started(script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(HERE / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def asked(process: "subprocess.Popen[str]", **what: Any) -> Any:
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(what), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def figures(both: "dict[str, subprocess.Popen[str]]", mode: str) -> dict[str, Any]:
    for process in both.values():
        asked(process, mode=mode)
        asked(process, round=2)
    ms: dict[str, list[float]] = {who: [] for who in both}
    for number in range(ROUNDS):
        for who in both if number % 2 else reversed(both):
            ms[who].append(round(min(asked(both[who], round=2)["ms"]), 2))
    own, family = (ms[who] for who in ("own class", "family"))
    medians = statistics.median(own) / statistics.median(family)
    return {"ms": ms, "ratio of medians": round(medians, 3), "of least": round(min(own) / min(family), 3)}


result: dict[str, Any] = {"what": "own_class_host_cpu", "date": date.today().isoformat(), "models": {}}
for name in names:
    with tempfile.TemporaryDirectory() as folder:
        family = started("family.py", name, folder, families)
        asked(family, mode="one rank")  # its file is there then
        both = {"own class": started("own.py", name, folder, str(HERE.parents[2])), "family": family}
        result["models"][name] = {}
        for mode in MODES:
            result["models"][name][mode] = figures(both, mode)
            Path(out).write_text(json.dumps(result) + "\n")
        for process in both.values():
            process.kill()
            process.wait()
