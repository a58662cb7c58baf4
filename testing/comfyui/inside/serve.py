"""Boots ComfyUI and the pack once, and runs scripts of a folder in processes forked from this one.

Arguments: the ComfyUI checkout, a base directory (with checkpoints) and the scripts' folder. Each line of standard input
asks for a script, as JSON: see `run`; with "here" it is run in this process, and what it imports and loads is there for all
that follow. When the script has ended, a line of standard output has its exit code.
"""

import gc
import importlib
import json
import os
import sys
import zlib
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

REPLIES = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever else is printed is no reply

sys.path.insert(1, sys.argv.pop(3))  # before the standard library, which has a `trace` too

import boot  # noqa: E402
import torch  # noqa: E402


def main() -> None:
    boot.load_pack(boot.PACK)
    boot.load_pack(boot.FORKED_RANKS)
    freeze()
    for line in sys.stdin:
        sys.stdout.flush()
        request = json.loads(line)
        if request.pop("here"):
            results_of(request["script"], request["arguments"], request["skip"], request["result"])
            freeze()
            print(0, file=REPLIES, flush=True)
            continue
        if (child := os.fork()) == 0:
            run(**request)
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=REPLIES, flush=True)


def freeze() -> None:
    """ComfyUI looks for garbage often, and what has been imported is none: a tenth of what the scripts take."""
    gc.collect()
    gc.freeze()


def run(script: str, arguments: dict[str, Any], skip: list[str], result: str, output: str) -> None:
    """In a child. `result`: the file for the script's results. `output`: for the output of the script and its ranks."""
    with open(output, "wb") as printed, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    # The parent started it, so this process cannot wait for its end, which is how one looks whether it runs.
    forkserver._forkserver.ensure_running = lambda: None
    results_of(script, arguments, skip, result)


def results_of(script: str, arguments: dict[str, Any], skip: list[str], result: str) -> None:
    """Runs the script and writes what it found to `result`. Its draws without a generator are the same in each run."""
    torch.manual_seed(zlib.crc32(script.encode()))
    results = boot.Results(skip)
    importlib.import_module(script).main(results, **arguments)
    Path(result).write_text(json.dumps(results.found))


if __name__ == "__main__":
    main()
