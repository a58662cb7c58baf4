"""The client's own process is killed: every rank must end by itself, whatever it is in the middle of.

`python -m tests.campaigns.faults.orphans FAULT` is the client: it does what the fault's phase needs and then waits to be
killed.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from . import census, rank
from .fault import Fault
from .table import COMPUTING
from .trial import LIMIT, STRIKE, Verdict

ROOT = Path(__file__).resolve().parents[3]
KIND = "client killed"
VARIANTS = ("works", "hangs", "stopped")
"""What the victim does at that moment. While one hangs, the others wait for it in transfers."""
PHASES = {"start": 1, "rendezvous": 0, "loading": 3, "exact": 2, "banded": 5, "idle": 0, "decoding": 4}
"""Phase -> moment."""


def all_faults(seed: int) -> list[Fault]:
    """One for each phase and variant; over two pipeline stages and two sequence ranks by turns."""
    faults = []
    for number, (phase, moment) in enumerate(PHASES.items()):
        for place, variant in enumerate(VARIANTS):
            if variant == "hangs" and phase == "idle":
                continue
            degrees = ("pipe 2", "ulysses 2")[(number + place) % 2]
            faults.append(Fault(KIND, variant, phase, degrees, (number + place) // 2 % 2, moment, seed))
    return faults


def try_out(fault: Fault, factor: float = 1.0) -> Verdict:
    """`seconds`: from the client's end to the last rank's."""
    verdict = Verdict(fault)
    with tempfile.TemporaryDirectory(prefix="orphans-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.campaigns.faults.orphans", name, json.dumps(dataclasses.asdict(fault))]
        with open(folder / "said", "wb") as said:
            client = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + factor * STRIKE
            fired = lambda: list(folder.glob(f"faults-*/{rank.FIRED}"))  # noqa: E731
            while not fired() and client.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            if not fired():
                verdict.problems.append(f"the fault did not strike: {(folder / 'said').read_text()}")
            time.sleep(0.1)
            pids = [child.pid for child in psutil.Process(client.pid).children(recursive=True)]
        finally:
            client.kill()
            client.wait()
        killed = time.monotonic()
        left = census.wait_until_gone(pids, factor * LIMIT)
        verdict.seconds = time.monotonic() - killed
        if len(pids) < 2:
            verdict.problems.append(f"there were only the processes {pids}")
        if left:
            verdict.problems.append(f"still there after {factor * LIMIT:.0f} s: {left}")
            for pid in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        files = [str(path) for path in folder.glob("faults-*/tmp/*")]
        if files:
            verdict.problems.append(f"left over: temporary files {files}")
    return verdict


def main() -> None:
    folder, fault = Path(sys.argv[1]), Fault(**json.loads(sys.argv[2]))
    tempfile.tempdir = str(folder)
    from .session import LONG, fault_session

    with fault_session(silence=600.0) as made:
        if fault.phase not in ("start", "rendezvous"):
            made.prepare(fault)
        rank.write(made.folder / rank.ARMED, dataclasses.asdict(fault))
        if fault.phase in COMPUTING:
            made.standard(fault.degrees, LONG)
        elif fault.phase != "idle":
            made.attempt(fault, lambda: True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
