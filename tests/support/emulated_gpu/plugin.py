"""pytest's `--emulated-gpus`: the whole run has emulated devices, in this process and in the ranks that it forks."""

import contextlib
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from .processes import emulated_everywhere


class EmulatedGpus:
    """A test in which something is noted fails."""

    def __init__(self, cards: list[str]):
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="emulated-gpu-"))
        self._record = self._stack.enter_context(emulated_everywhere(Path(folder), *cards)).record

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        violations = self._record.violations
        self._record.forget()
        assert not violations, "\n".join(violations[:20])
        return result

    def pytest_unconfigure(self) -> None:
        self._stack.close()
