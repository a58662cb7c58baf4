"""One soak from its beginning to its end."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from scripts.comfyui_server import ComfyUIServer, find_python
from tests.comfyui.standins import ENCODERS_PACK

from . import files
from .processes import Watch
from .record import Soak
from .requests import draw
from .schedule import Plan, make_plan
from .session import Run, Session, compute_references
from .setups import OTHER_RANKS, TWO_RANKS

EACH = 5
"""Requests for each setup, in a long soak."""
SAID_EVERY = 20
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc, which would keep freed memory of ComfyUI's process, up to 180 MB of it here, for its next request: a resident
size would then say how the heap lies, not what is held."""


def plan_of(prompts: int, seed: int) -> Plan:
    """A short soak has fewer requests, so that each still comes back several times."""
    each = min(EACH, max(1, prompts // 100))
    return make_plan(draw(TWO_RANKS, each, seed), draw(OTHER_RANKS, each, seed), prompts, seed)


def soak(checkout: Path, prompts: int, seed: int, said: Callable[[str], None]) -> Soak:
    """`said` is called with a line now and then. The server is stopped at the end, whatever happens."""
    plan = plan_of(prompts, seed)
    result = Soak(seed, plan.window, plan.lived)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        base, temporary = Path(folder) / "base", Path(folder) / "temporary"
        temporary.mkdir()
        files.write(base)
        # Nothing kept from prompt to prompt, where requests are to be alone; what ComfyUI usually keeps, in the soak.
        with _server(checkout, base, temporary, "--cache-none") as server:
            references = compute_references(Session(server, base), plan.requests, said)
        said(f"{len(references)} requests alone: {time.monotonic() - began:.0f} s")
        with _server(checkout, base, temporary, "--cache-classic") as server:
            watch = Watch(server, temporary)
            _run(Run(Session(server, base), watch, references, result), plan, prompts, said)
            watch.ranks()
        result.left = watch.left()
    return result


def _run(run: Run, plan: Plan, prompts: int, said: Callable[[str], None]) -> None:
    began, told = time.monotonic(), 0
    for batch in plan.batches:
        try:
            run.batch(batch)
        except RuntimeError as error:  # ComfyUI itself is gone
            run.soak.failures.append(str(error))
            return
        done = len(run.soak.endings)
        if done - told >= SAID_EVERY:
            told = done
            unequal = sum(ending.difference not in (None, 0.0) for ending in run.soak.endings)
            said(f"{done}/{prompts} prompts, {time.monotonic() - began:.0f} s, {unequal} unequal")


@contextlib.contextmanager
def _server(checkout: Path, base: Path, temporary: Path, cache: str) -> Iterator[ComfyUIServer]:
    """A ComfyUI whose temporary files, and those of its ranks, are in a folder of their own."""
    with (
        mock.patch.dict(os.environ, {"TMPDIR": str(temporary), **FREED_AT_ONCE}),
        ComfyUIServer(checkout, base, find_python(checkout), ("--cpu", cache), (ENCODERS_PACK,)) as server,
    ):
        yield server
