"""Trying a mutant out, on a copy of the repository: whether a test fails with it that passes without it."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .mutant import Mutant

REPOSITORY = Path(__file__).parents[3]
TIERS = {
    "quick": "not (processes or alone or full or comfyui or browser or ray or gpu or slow)",
    "default": "not full",
}
"""pytest's -m of each tier, see scripts/test."""

SECONDS = 900.0
"""Of one run of tests. A mutant may well make ranks wait for each other for ever."""

FAILED, NOTHING_RAN = 1, 5
"""Exit statuses of pytest."""


@dataclass(frozen=True)
class Verdict:
    """`caught_by`: the tier whose tests noticed it, None for a mutant that lived. `test`: the first that did; empty if the
    tests came to no end.
    """

    mutant: Mutant
    caught_by: str | None
    test: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        """No later than by its tier."""
        return self.caught_by == "quick" or self.caught_by == self.mutant.tier

    def __str__(self) -> str:
        found = f"caught by {self.caught_by}: {self.test or 'tests that do not end'}" if self.caught_by else "LIVED"
        return f"{self.mutant.name}: {found}, {self.seconds:.0f} s"


@contextlib.contextmanager
def copy_of(repository: Path) -> Iterator[Path]:
    """A folder with the repository's files as they are now, committed or not, without those that git ignores."""
    listing = ["git", "-C", repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="parallel-dit-mutants-") as name:
        folder = Path(name) / repository.name
        for name in filter(None, names):
            if (repository / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, target)
        yield folder


@contextlib.contextmanager
def mutated(folder: Path, mutant: Mutant) -> Iterator[None]:
    """Within it the copy in `folder` has the mutant."""
    path = folder / mutant.file
    text = path.read_text()
    _write(path, mutant.applied(text))
    try:
        yield
    finally:
        _write(path, text)


def try_out(folder: Path, mutant: Mutant, tiers: tuple[str, ...]) -> Verdict:
    """Run the mutant's tests in the copy, tier after tier, until one notices it. A test that fails without the mutant too is
    left out, and the tier is tried again."""
    began, left_out = time.monotonic(), []
    for tier in tiers:
        tests = mutant.tests if tier == "quick" else (*mutant.tests, *mutant.wider)
        while True:
            with mutated(folder, mutant):
                test = failing(folder, ["-x", *tests, *left_out], tier)
            if test is None:
                break
            if not test or failing(folder, [test], tier) is None:
                return Verdict(mutant, tier, test, time.monotonic() - began)
            left_out.append(f"--deselect={test}")
    return Verdict(mutant, None, "", time.monotonic() - began)


def failing(folder: Path, arguments: list[str], tier: str) -> str | None:
    """The first test of the tier that fails, by pytest's name. None if none does; empty if they come to no end."""
    with tempfile.TemporaryDirectory(prefix="parallel-dit-mutants-") as name:
        cache, log = Path(name) / "cache", Path(name) / "log"
        options = ["-q", "-o", f"cache_dir={cache}", "-m", TIERS[tier], *arguments]
        command, environment = [sys.executable, "-m", "pytest", *options], os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("wb") as said:
            run = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True)
            try:
                status = run.wait(SECONDS)
            except subprocess.TimeoutExpired:
                return ""
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        if status in (0, NOTHING_RAN):
            return None
        failed = cache / "v" / "cache" / "lastfailed"
        if status != FAILED or not failed.exists():
            raise RuntimeError(f"pytest {' '.join(options)} ended with status {status}:\n{log.read_text()[-4000:]}")
        return next(iter(json.loads(failed.read_text())))


def _write(path: Path, text: str) -> None:
    """Also without what Python compiled from the text before: it tells them apart by whole seconds and the size."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
