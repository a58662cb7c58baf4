"""One soak from its beginning to its end, and all that it shows to be wrong."""

import contextlib
import io
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import psutil
from PIL import Image
from safetensors.numpy import load_file

from parallel_backend.rank.worker import REST_SECONDS
from scripts.comfyui_server import ComfyUIServer, Outcome, find_python
from testing.host_memory import held_bytes
from tests.comfyui.conftest import ranks

from .requests import OTHER_RANKS, TWO_RANKS, Request, draw, prompt, write_files

EACH = 5
"""Requests for each setup, in a long soak."""
RESTARTS = 0.12
"""Share of prompts at the end, among which setups on other devices are."""
CANCELLED = 0.15
"""Share of prompts that are cancelled, each at a random part of the seconds that its request takes alone. In rounds none is
cancelled that has the ranks load: that ends them, and they are to live on."""
LATEST = 1.2
"""Of these seconds: some cancellations come too late."""
FREE_SECONDS, END_SECONDS = 0.5, 10.0
"""Until ComfyUI has looked at what its button sets; until a process has ended."""
GROWTH = 0.02
"""Of a process's memory with nothing loaded, from the second round to the last one."""
MORE = 2
"""File descriptors or threads that a process may have more at the end, with nothing loaded, than before."""
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc, which would keep freed memory of ComfyUI's process, up to 180 MB of it here, for its next request: a resident
size would then say how the heap lies, not what is held."""
UNLOAD_PROMPT = {"1": {"class_type": "UnloadParallelDiT", "inputs": {}}}
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Turn:
    """One prompt. `cancel`: when, in units of the seconds that the request takes alone; None: it is not cancelled."""

    request: Request
    cancel: float | None = None
    trace: bool = False


@dataclass(frozen=True)
class Reading:
    """A process with nothing loaded and nothing under way, after prompt `number`. `held`: bytes without pages of files."""

    number: int
    role: str
    pid: int
    held: int
    descriptors: int
    threads: int


@dataclass
class Soak:
    """`window`: prompts in a round of all requests on two ranks; `lived`: in all rounds, which the same ranks live through.
    `status`: how each prompt ended. `wrong`: in words."""

    seed: int
    window: int = 0
    lived: int = 0
    status: list[str] = field(default_factory=list)
    compared: int = 0
    readings: list[Reading] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def turns_of(prompts: int, seed: int) -> tuple[list[list[list[Turn]]], list[list[Turn]]]:
    """Rounds, each of batches of all requests on two ranks in another order, setup by setup; then batches that change to
    other devices and back. The prompts of a batch are queued at once. A short soak has fewer requests, so that each comes
    back."""
    chance, each = random.Random(seed), min(EACH, max(1, prompts // 100))
    two, other = ([draw((setup,), each, seed) for setup in setups] for setups in (TWO_RANKS, OTHER_RANKS))
    every = [request for requests in two for request in requests]
    extra = round(len(every) * CANCELLED / (1 - CANCELLED))
    rounds = []
    for index in range(max(1, int(prompts * (1 - RESTARTS)) // (len(every) + extra))):
        batches: list[list[Turn]] = []
        cancelled = chance.choices(every, k=extra)
        for requests in chance.sample(two, len(two)):
            first, *more = chance.sample(requests, len(requests))
            turns = [Turn(request) for request in more]
            turns += [_cancelled(request, chance) for request in cancelled if request in requests]
            turns = [Turn(first, trace=index == 0 and first.setup.ranks > 0), *chance.sample(turns, len(turns))]
            batches += _batches(turns, chance)
        rounds.append(batches)
    left, restarts = prompts - sum(len(batch) for batches in rounds for batch in batches), []
    while left > 0:
        requests = chance.choice(two if len(restarts) % 2 else other)
        chosen = chance.choices(requests, k=min(left, chance.randint(2, 4)))
        restarts.append([_cancelled(each, chance) if chance.random() < 2 * CANCELLED else Turn(each) for each in chosen])
        left -= len(chosen)
    return rounds, restarts


def _cancelled(request: Request, chance: random.Random) -> Turn:
    return Turn(request, chance.uniform(0, LATEST))


def _batches(turns: list[Turn], chance: random.Random) -> Iterator[list[Turn]]:
    """One to four prompts at once."""
    while turns:
        count = chance.choices((1, 2, 3, 4), (6, 2, 1, 1))[0]
        yield turns[:count]
        turns = turns[count:]


def difference(found: Arrays, expected: Arrays) -> float:
    """Largest difference; 0 only if shapes, dtypes and all bits are equal, infinite if they cannot be compared."""
    if [(array.shape, array.dtype) for array in found] != [(array.shape, array.dtype) for array in expected]:
        return math.inf
    if all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True)):
        return 0.0
    largest = max(float(np.abs(a.astype(float) - b).max()) for a, b in zip(found, expected, strict=True))
    return math.inf if math.isnan(largest) else largest or math.ulp(0.0)  # -0.0 for 0.0 is no equal bit


@dataclass
class Session:
    """A running ComfyUI that is sent prompts. `base`: its base directory. `seen`: all its processes so far."""

    server: ComfyUIServer
    base: Path
    serial: int = 0
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def send(self, request: Request, trace: bool = False) -> tuple[str, str]:
        """Queue it: (the prompt's id, the id of the node with its latent)."""
        self.serial += 1
        nodes, saved = prompt(request, self.serial, trace)
        return self.server.queue(nodes), saved

    def arrays(self, outcome: Outcome, saved: str) -> Arrays:
        """The latent and the images."""
        (file,) = outcome.outputs[saved]["latents"]
        latent = load_file(self.base / file["type"] / file["subfolder"] / file["filename"])["latent_tensor"]
        return latent, *(np.array(Image.open(io.BytesIO(image))) for image in outcome.images)

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """By role: ComfyUI, and the ranks in the order of their numbers."""
        main = psutil.Process(self.server.process.pid)
        found = [("ComfyUI", main), *((f"rank {index}", rank) for index, rank in enumerate(ranks(self.server)))]
        self.seen |= {process.pid: process for process in (main, *main.children(recursive=True))}
        return found


def compute_references(session: Session, requests: Iterable[Request]) -> dict[str, tuple[Arrays, float]]:
    """Each request alone, by its name, and the seconds that it took: nothing is loaded before it. AssertionError for a
    result that could not show a mistake."""
    found: dict[str, tuple[Arrays, float]] = {}
    for request in requests:
        session.server.run(UNLOAD_PROMPT)
        began = time.monotonic()
        prompt_id, saved = session.send(request)
        outcome = session.server.wait(prompt_id)
        assert outcome.status == "success", f"{request}: {outcome.error}"
        arrays = session.arrays(outcome, saved)
        assert np.isfinite(arrays[0]).all(), f"{request}: the latent is not finite"
        assert all(array.std() > 0 for array in arrays), f"{request}: an image of one colour"
        for name, (other, _) in found.items():
            assert difference(arrays, other) > 0, f"{request.name} and {name} give the same"
        found[request.name] = arrays, time.monotonic() - began
    return found


@dataclass
class Run:
    """A soak under way: sends batches, cancels, compares, reads the processes. `temporary`: their TMPDIR."""

    session: Session
    references: dict[str, tuple[Arrays, float]]
    soak: Soak
    temporary: Path

    def batch(self, turns: list[Turn]) -> None:
        sent = [(turn, *self.session.send(turn.request, turn.trace)) for turn in turns]
        for turn, prompt_id, saved in sent:
            if turn.cancel is not None:
                time.sleep(turn.cancel * self.references[turn.request.name][1] / 3)  # most of it was loading
                self.session.server.post("/interrupt", {"prompt_id": prompt_id} if len(sent) > 1 else {})
            wrong = self._wrong(turn, self.session.server.wait(prompt_id), saved)
            if wrong:
                self.soak.wrong.append(f"prompt {len(self.soak.status)} ({turn.request.name}): {wrong}")
        if (files := len(list(self.temporary.iterdir()))) > 1:
            self.soak.wrong.append(f"{files} temporary files or folders at once, although one pool has one")
        self.session.processes()

    def _wrong(self, turn: Turn, outcome: Outcome, saved: str) -> str:
        """Empty if the prompt ended as it should."""
        self.soak.status.append(outcome.status)
        if outcome.status == "interrupted":
            return "" if turn.cancel is not None else "was cancelled, though it was not asked for"
        if outcome.status != "success":
            return outcome.error
        self.soak.compared += 1
        apart = difference(self.session.arrays(outcome, saved), self.references[turn.request.name][0])
        return f"differs from the same request alone by {apart:.3g}" if apart else ""

    def empty(self) -> None:
        """Unloads everything by ComfyUI's button and by the node, and reads the processes."""
        self.session.server.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(FREE_SECONDS)
        outcome = self.session.server.run(UNLOAD_PROMPT)
        if outcome.status != "success":
            self.soak.wrong.append(f"unloading after prompt {len(self.soak.status)}: {outcome.error}")
        time.sleep(3 * REST_SECONDS)  # with the time between a step's messages
        for role, process in self.session.processes():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # a rank that is just ending
                held, counts = held_bytes((process.pid,)), (process.num_fds(), process.num_threads())
                self.soak.readings.append(Reading(len(self.soak.status), role, process.pid, held, *counts))


def grown(soak: Soak) -> Iterator[str]:
    """From the second round to the last one: what is loaded or compiled at first use is there after the first."""
    for pid, role in {reading.pid: reading.role for reading in soak.readings}.items():
        own = [reading for reading in soak.readings if reading.pid == pid]
        early = [reading for reading in own if soak.window < reading.number <= 2 * soak.window]
        late = [reading for reading in own if soak.lived - soak.window < reading.number <= soak.lived]
        if soak.lived < 3 * soak.window or not early or not late:
            continue

        def both(what: str, some=(early, late)) -> list[Any]:
            return [median(getattr(reading, what) for reading in readings) for readings in some]

        before, after = both("held")
        if after >= (1 + GROWTH) * before:
            yield f"{role} grew by {100 * (after / before - 1):.1f} % from {before / 1e6:.1f} MB"
        for what in ("descriptors", "threads"):
            before, after = both(what)
            if after > before + MORE:
                yield f"{role} has {after:g} {what} with nothing loaded, {before:g} before"


def soak(checkout: Path, prompts: int, seed: int, said: Callable[[str], None]) -> Soak:
    """`said` is called with a line now and then. The server is stopped at the end, whatever happens."""
    rounds, restarts = turns_of(prompts, seed)
    batches = [batch for one in rounds for batch in one]
    requests = {turn.request: None for batch in (*batches, *restarts) for turn in batch}
    result = Soak(seed, sum(map(len, batches)) // len(rounds), sum(map(len, batches)))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        base, temporary = Path(folder) / "base", Path(folder) / "temporary"
        temporary.mkdir()
        write_files(base)
        # Nothing kept from prompt to prompt, so that requests are alone; what ComfyUI usually keeps, in the soak.
        with _server(checkout, base, temporary, "--cache-none") as server:
            references = compute_references(Session(server, base), sorted(requests, key=lambda each: each.name))
        said(f"{len(references)} requests alone")
        with _server(checkout, base, temporary, "--cache-classic") as server:
            run = Run(session := Session(server, base), references, result, temporary)
            try:
                for one in rounds:
                    for batch in one:
                        run.batch(batch)
                    run.empty()
                    said(f"{len(result.status)}/{prompts} prompts, {len(result.wrong)} wrong")
                for batch in restarts:
                    run.batch(batch)
                run.empty()
            except (RuntimeError, TimeoutError) as error:  # ComfyUI itself is gone, or a prompt hangs
                result.wrong.append(str(error))
            session.processes()
        _, alive = psutil.wait_procs(list(session.seen.values()), timeout=END_SECONDS)
        result.wrong += [f"left: process {process.pid}: {' '.join(process.cmdline())[:200]}" for process in alive]
        result.wrong += [f"left: temporary file {path.name}" for path in sorted(temporary.iterdir())]
    result.wrong += grown(result)
    return result


@contextlib.contextmanager
def _server(checkout: Path, base: Path, temporary: Path, cache: str) -> Iterator[ComfyUIServer]:
    """A ComfyUI whose temporary files, and those of its ranks, are in a folder of their own."""
    with (
        mock.patch.dict(os.environ, {"TMPDIR": str(temporary), **FREED_AT_ONCE}),
        ComfyUIServer(checkout, base, find_python(checkout), ("--cpu", cache)) as server,
    ):
        yield server
