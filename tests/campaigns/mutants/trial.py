"""Trying a mutant out, on a copy of the repository: whether a test fails with it that passes without it."""

import contextlib
import importlib.util
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from .mutant import Mutant
from .runner import Runner

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
    """`caught_by`: the tier whose tests noticed it, None for a mutant that lived. `test`: the first that did; empty where
    the tests came to no end.
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


def try_out(runner: Runner, folder: Path, mutant: Mutant, tiers: tuple[str, ...], unsound: Collection[str] = ()) -> Verdict:
    """Run the mutant's tests in the copy, tier after tier, until one notices it. `unsound`: tests that are left out."""
    began = time.monotonic()
    left_out = [f"--deselect={test}" for test in unsound]
    for tier in tiers:
        tests = mutant.tests if tier == "quick" else (*mutant.tests, *mutant.wider)
        with mutated(folder, mutant):
            failed = failing(runner, folder, ["-x", *tests, *left_out], tier)
        if failed != []:
            return Verdict(mutant, tier, "" if failed is None else failed[0], time.monotonic() - began)
    return Verdict(mutant, None, "", time.monotonic() - began)


def confirmed(runner: Runner, folder: Path, verdicts: list[Verdict], tiers: tuple[str, ...]) -> list[Verdict]:
    """The verdicts, if each test that noticed a mutant passes without one; mutants whose test does not are tried again
    without that test.
    """
    unsound: list[str] = []
    while tests := sorted({verdict.test for verdict in verdicts if verdict.test}):
        found = failing(runner, folder, tests, "default")
        assert found is not None, "tests that noticed mutants do not end without one"
        if not found:
            break
        unsound += found
        verdicts = [
            try_out(runner, folder, verdict.mutant, tiers, unsound) if verdict.test in found else verdict
            for verdict in verdicts
        ]
    return verdicts


def failing(runner: Runner, folder: Path, arguments: list[str], tier: str) -> list[str] | None:
    """The tests of the tier that fail, by pytest's names. None if they came to no end."""
    with tempfile.TemporaryDirectory(prefix="parallel-dit-mutants-") as name:
        log, cache = Path(name) / "log", Path(name) / "cache"
        options = ["-q", "-o", f"cache_dir={cache}", "-m", TIERS[tier], *arguments]
        status = runner.run(folder, options, log, SECONDS)
        if status is None:
            return None
        if status in (0, NOTHING_RAN):
            return []
        failed = cache / "v" / "cache" / "lastfailed"
        if status != FAILED or not failed.exists():
            raise RuntimeError(f"pytest {' '.join(options)} ended with status {status}:\n{log.read_text()[-4000:]}")
        return list(json.loads(failed.read_text()))


def _write(path: Path, text: str) -> None:
    """Also without what Python compiled from the text before: it tells them apart by whole seconds and the size."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
