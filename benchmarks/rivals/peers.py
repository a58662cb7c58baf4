"""The others in the same run: plain diffusers loops, diffusers' own context parallelism, and xDiT, each on processes of
its own that are kept from round to round.
"""

import functools
import json
import os
import select
import signal
import subprocess
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.harness import slow_link
from benchmarks.harness.measuring import REHEARSAL, Outcome, run_plain
from benchmarks.harness.subjects import Subject
from parallel_backend.rank.comm.interfaces import loopback_interface
from parallel_backend.rank.comm.process_group import join, leave
from parallel_backend.rank.comm.rendezvous import Rendezvous

from . import diffusers_cpu, diffusers_flux

RANKS = 2
STOP_SECONDS = 5
GROUP_TIMEOUT = timedelta(minutes=30)
PLAIN, APART = "plain", "apart"
XDIT_SCRIPT = Path(__file__).with_name("xdit_peer.py")
START_SECONDS = 300


class PeerFailed(RuntimeError):
    """A peer cannot be run here, or ended."""


def _serve_diffusers(
    rank: int, world: int, subject: Subject, path: Path, rendezvous: Path, connection: Connection, links: Path | None
) -> None:
    """A rank's life: a mode in, an Outcome's numbers out, until the connection ends. `links`: see DiffusersRanks."""
    from diffusers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()  # "experimental feature", once for each model
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames a collective that diffusers calls
    if links is not None:
        slow_link.slow_down(links, world)
    join(rank, ("cpu",) * world, Rendezvous(rendezvous, world, GROUP_TIMEOUT), GROUP_TIMEOUT)
    alone = functools.cache(lambda: subject.load(path))
    together = functools.cache(lambda mode: diffusers_cpu.parallel(subject.load(path), mode, world))
    while True:
        try:
            mode, asked = connection.recv()
        except EOFError:
            break
        model = alone() if mode in (PLAIN, APART) else together(mode)
        start = (lambda: None) if mode == PLAIN else dist.barrier
        outcome = run_plain(asked, asked.predict(model), start=start)
        weights = sum(weight.nbytes for weight in model.parameters())
        connection.send((outcome.seconds, outcome.sample.numpy(), outcome.cpu_seconds[0], outcome.peak_bytes[0], weights))
    leave()


class DiffusersRanks:
    """Processes, two as a rule, with diffusers' own model: one of them runs the plain loop, or all, apart or together.

    `links`: folder of the Switch that is between them (slow_link.py); None for the machine's own links.
    """

    def __init__(self, subject: Subject, path: Path, links: Path | None = None, world: int = RANKS):
        self._subject = subject
        self._directory = TemporaryDirectory(prefix="diffusers-ranks-")
        store = Path(self._directory.name) / "store"
        store.touch()
        context = torch.multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, subject, path, store, theirs, links)
            process = context.Process(target=_serve_diffusers, args=arguments, name=f"diffusers rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, mode: str) -> Outcome:
        """PLAIN: the first process alone. APART: each by itself, one entry of the batch where there are two, else one
        picture. `ulysses`, `ring`: together.

        Raises EOFError if a rank ended; its traceback is on stderr.
        """
        busy = self._connections[:1] if mode == PLAIN else self._connections
        asked = replace(self._subject, cfg=1.0) if mode == APART else self._subject
        for connection in busy:
            connection.send((mode, asked))
        seconds, samples, cpu, peaks, weights = zip(*(connection.recv() for connection in busy), strict=True)
        return Outcome(max(seconds), torch.from_numpy(samples[0]), cpu, peaks, weights)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(STOP_SECONDS)
            process.kill()
        self._directory.cleanup()


def xdit_version(python: Path | None) -> str:
    """Of the xfuser that this interpreter has. PeerFailed says why there is none."""
    if python is None:
        raise PeerFailed("no --xdit-python given")
    if not python.exists():
        raise PeerFailed(f"{python} does not exist")
    look = "import importlib.metadata as m, torch; print(m.version('xfuser'), torch.__version__)"
    found = subprocess.run([python, "-I", "-c", look], capture_output=True, text=True)
    if found.returncode:
        raise PeerFailed(f"{python} has no xfuser: {found.stderr.strip().splitlines()[-1]}")
    version, torch_version = found.stdout.split()
    return f"{version} with torch {torch_version}"


class XditRanks:
    """Processes of another interpreter, two as a rule, that run xDiT in one mode (see xdit_peer.py).

    `degrees`: those above 1 of pipe, ulysses, ring, cfg, tensor; `patches`: PipeFusion's; `links`: as DiffusersRanks has it.
    Raises PeerFailed if one ends.
    """

    def __init__(
        self,
        python: Path,
        subject: Subject,
        path: Path,
        degrees: dict[str, int],
        patches: int,
        links: Path | None = None,
        world: int = RANKS,
    ):
        self._subject = subject
        self._directory = TemporaryDirectory(prefix="xdit-ranks-")
        place = Path(self._directory.name)
        self._sample = place / "sample.safetensors"
        x, prompt = subject.problem()
        inputs = {"latent": x, **prompt.positive}
        save_file(inputs, place / "inputs.safetensors")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback_interface()}
        self._processes = []
        for rank in range(world):
            settings = {
                "rank": rank,
                "world": world,
                "threads": 1,
                "store": str(place / "store"),
                "folder": str(path.with_name("diffusers")),
                "inputs": str(place / "inputs.safetensors"),
                "sample": str(self._sample),
                "degrees": dict.fromkeys(("pipe", "ulysses", "ring", "cfg", "tensor"), 1) | degrees,
                "patches": patches,
                "links": str(links or ""),
            }
            with (place / f"stderr.{rank}").open("w") as errors:
                process = subprocess.Popen(
                    [python, "-I", XDIT_SCRIPT, json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                )
            self._processes.append(process)
        try:
            self._answers()
        except PeerFailed:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _answers(self) -> list[dict[str, Any]]:
        """What each rank says next. They wait for each other, so all are listened to at once: one may have ended."""
        deadline = time.monotonic() + START_SECONDS + 60 * self._subject.steps
        found: dict[int, dict[str, Any]] = {}
        outputs = {process.stdout.fileno(): (rank, process) for rank, process in enumerate(self._processes)}
        while len(found) < len(self._processes):
            ready, _, _ = select.select([fd for fd, (rank, _) in outputs.items() if rank not in found], [], [], 1.0)
            for fd in ready:
                rank, process = outputs[fd]
                line = process.stdout.readline()
                if not line:
                    log = (Path(self._directory.name) / f"stderr.{rank}").read_text().strip().splitlines()
                    raise PeerFailed(f"rank {rank} ended: {log[-1] if log else 'no output'}")
                found[rank] = json.loads(line)
            if time.monotonic() > deadline:
                raise PeerFailed(f"ranks {sorted(set(range(RANKS)) - set(found))} did not answer")
        return [found[rank] for rank in range(RANKS)]

    def run_steps(self, steps: int) -> list[dict[str, Any]]:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            print(json.dumps({"steps": steps}), file=process.stdin, flush=True)
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: signal.Signals) -> None:
        """They are stopped while others are measured: their idle threads took a tenth of both cores."""
        for process in self._processes:
            process.send_signal(number)

    def run(self) -> Outcome:
        self.run_steps(REHEARSAL)
        answers = self.run_steps(self._subject.steps)
        sample = load_file(self._sample)["sample"]
        if sample.ndim == 3:  # packed, as Flux's pipeline has it
            sample = diffusers_flux.unpacked(sample, self._subject.side // 2)
        names = ("cpu_seconds", "peak_bytes", "weight_bytes")
        cpu, peaks, weights = (tuple(answer[name] for answer in answers) for name in names)
        return Outcome(max(answer["seconds"] for answer in answers), sample, cpu, peaks, weights)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self._directory.cleanup()
