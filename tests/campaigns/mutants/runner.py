"""Runs pytest in processes that are forked from one which has imported torch and diffusers: importing them takes longer than
most of the tests that are run."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
OURS = ("tests", "testing", "parallel_backend", "nodes", "scripts", "benchmarks")
"""Modules of the checkout, which a copy has its own of."""
IMPORTS = ("torch.distributed", "diffusers.models.transformers.transformer_flux")
IMPORTED_BEFORE = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""diffusers imports a package that is a plugin of pytest's too, which pytest would have liked to be the first to import."""
LOOK_SECONDS = 0.05


class Runner:
    """The process to fork from, as a context manager. One run at a time. `imports`: modules that it imports first."""

    def __init__(self, imports: tuple[str, ...] = IMPORTS):
        self._imports = imports

    def __enter__(self) -> "Runner":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.campaigns.mutants.runner", *self._imports],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, folder: Path, arguments: list[str], log: Path, seconds: float) -> int | None:
        """pytest's exit status in `folder`; None if it did not end within `seconds`. What it prints goes to `log`."""
        self._process.stdin.write(json.dumps([str(folder), arguments, str(log), seconds]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """What Runner starts: a line of JSON in for each run, a line with its exit status out."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        folder, arguments, log, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(folder, log)
            os._exit(pytest.main([*IMPORTED_BEFORE, *arguments]))
        status = _wait(child, time.monotonic() + seconds)
        sys.stdout.write(json.dumps(status) + "\n")
        sys.stdout.flush()


def _become(folder: str, log: str) -> None:
    """The forked process: as if it had been started in `folder`."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, replacement in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(replacement, stream)
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")


def _wait(child: int, deadline: float) -> int | None:
    """Its exit status. Ends whatever it leaves behind, and itself at the deadline."""
    status = None
    try:
        while time.monotonic() < deadline:
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(code)
                break
            time.sleep(LOOK_SECONDS)
        return status
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)


if __name__ == "__main__":
    serve()
