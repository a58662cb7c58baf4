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

TIERS = {
    "quick": "not (processes or alone or full or comfyui or browser or ray or gpu or slow)",
    "default": "not full",
}
"""pytest's -m of each tier, see scripts/test."""

SECONDS = 900.0
"""Of one run of tests. A mutant may well make ranks wait for each other for ever."""

FAILED, NOTHING_RAN = 1, 5
"""Exit statuses of pytest."""

TRIES = 3
"""Tests that failed without the mutant too and are left out, one after the other, before the trial is given up."""


@dataclass(frozen=True)
class Verdict:
    """`caught_by`: the tier whose tests noticed it, None for a mutant that lived. `test`: the first that did; empty where
    the tests came to no end. `unsound`: tests that failed without the mutant too, and so say nothing.
    """

    mutant: Mutant
    caught_by: str | None
    test: str
    seconds: float
    unsound: tuple[str, ...] = ()

    @property
    def as_expected(self) -> bool:
        """No later than by its tier."""
        return self.caught_by == "quick" or self.caught_by == self.mutant.tier

    def __str__(self) -> str:
        found = f"caught by {self.caught_by}: {self.test or 'tests that do not end'}" if self.caught_by else "LIVED"
        left_out = f" (fails without it too: {', '.join(self.unsound)})" if self.unsound else ""
        return f"{self.mutant.name}: {found}{left_out}, {self.seconds:.0f} s"


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
    """Run the mutant's tests in the copy, tier after tier, until one notices it."""
    began = time.monotonic()
    unsound: list[str] = []
    for tier in tiers:
        tests = mutant.tests if tier == "quick" else (*mutant.tests, *mutant.wider)
        for _ in range(TRIES):
            with mutated(folder, mutant):
                failed = first_failure(folder, [*tests, *(f"--deselect={test}" for test in unsound)], tier)
            if failed is None:
                break
            if not failed or first_failure(folder, [failed], tier) is None:
                return Verdict(mutant, tier, failed, time.monotonic() - began, tuple(unsound))
            unsound.append(failed)
    return Verdict(mutant, None, "", time.monotonic() - began, tuple(unsound))


def first_failure(folder: Path, arguments: list[str], tier: str) -> str | None:
    """The first test of the tier that fails, by pytest's name. Empty if the tests came to no end, None if they pass."""
    with tempfile.TemporaryDirectory(prefix="parallel-dit-mutants-") as name:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-o",
            f"cache_dir={name}/cache",
            "-m",
            TIERS[tier],
            *arguments,
        ]
        log = Path(name) / "log"
        with log.open("w") as output:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                return ""
            finally:
                with contextlib.suppress(ProcessLookupError):  # whatever the tests left behind
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status in (0, NOTHING_RAN):
            return None
        if status != FAILED:
            raise RuntimeError(f"pytest {' '.join(arguments)} ended with status {status}:\n{log.read_text()[-4000:]}")
        return next(iter(json.loads((Path(name) / "cache/v/cache/lastfailed").read_text())))


def _write(path: Path, text: str) -> None:
    """Also without what Python compiled from the text before: it tells them apart by whole seconds and the size."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
