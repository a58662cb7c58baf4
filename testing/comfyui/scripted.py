"""A ComfyUI in a separate process that runs scripts, for tests and benchmarks.

The process that starts it imports nothing of ComfyUI: it starts ComfyUI's Python, which may be another one.
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

INSIDE = Path(__file__).parent / "inside"
"""Modules that scripts import by their plain names: the process that runs the scripts has this folder on its path."""
FORKED_RANKS = Path(__file__).parent / "forked_ranks"
SCRIPT_SECONDS = 900.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class ComfyUI:
    """A checkout and the Python that runs it."""

    checkout: Path
    python: Path

    def has_class(self, name: str) -> bool:
        """Whether its supported_models has a class of this name."""
        return f"class {name}(" in (self.checkout / "comfy" / "supported_models.py").read_text("utf-8")


class Inside:
    """A booted ComfyUI without a server, which runs scripts one after the other: see inside/serve.py."""

    def __init__(
        self, comfyui: ComfyUI, base: Path, scripts: Path, flags: Iterable[str] = (), environment: Mapping[str, str] = {}
    ):
        """`base`: ComfyUI's base directory, with checkpoints. `scripts`: the folder that the scripts are in. `flags`: of
        ComfyUI. `environment`: beside this process's own."""
        self._base = base
        self._log = (base / "inside.log").open("w")
        self._process = subprocess.Popen(
            [comfyui.python, INSIDE / "serve.py", comfyui.checkout, base, scripts, *flags],
            cwd=base,
            env=os.environ | {"OMP_NUM_THREADS": "1", **environment},  # a process that has threads cannot be forked
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def run(
        self,
        script: str,
        *,
        here: bool = False,
        skip: Iterable[str] = (),
        seconds: float = SCRIPT_SECONDS,
        **arguments: Any,
    ) -> tuple[dict[str, Any], str]:
        """Its main(**arguments): (its results by case, all output of the script and its ranks).

        `here`: in the process that all later scripts are forked from. `skip`: cases that it need not measure. `seconds`:
        the process is killed if the script takes longer.
        """
        result, output = (self._base / f"{script}.{ending}" for ending in ("json", "txt"))
        request = {"script": script, "arguments": arguments, "result": str(result), "output": str(output)}
        request |= {"here": here, "skip": list(skip)}
        with timed(seconds, self._process):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            code = self._process.stdout.readline().strip()
        said = output if output.exists() else Path(self._log.name)
        printed = said.read_text(errors="replace")
        assert code == "0", f"{script} failed:\n{printed[-8000:]}"
        logs = sorted((self._base / "user" / "parallel_dit" / "logs").glob("*/rank-*"))  # the last two starts' of each rank
        return json.loads(result.read_text()), printed + "".join(log.read_text() for log in logs)

    @property
    def ended(self) -> bool:
        """Whether the process was killed, for a script that took too long."""
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(STOP_SECONDS)
        self._process.stdout.close()
        self._log.close()


@contextmanager
def timed(seconds: float, process: subprocess.Popen) -> Iterator[None]:
    """Context that kills the process and its children after so many seconds, so that a wait for the process ends."""

    def kill() -> None:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
