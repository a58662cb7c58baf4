"""Counts what a tier starts, since starting takes most of its time: a tier that starts more than it may fails.

`--starts "ComfyUI 60, ranks 900"` is what it may. Ranks that ComfyUI's processes start are not counted.
"""

import functools
import subprocess
from collections import Counter
from typing import Any
from unittest import mock

import pytest

from parallel_backend.processes.local import LocalRanks

SCRIPTS = ("main.py", "serve.py")
"""What ComfyUI's Python is started with: a server, or a process that runs scripts in a booted ComfyUI."""


class Starts:
    """The plugin. `allowed`: text of the option, empty for no limit."""

    def __init__(self, allowed: str):
        words = (part.split() for part in allowed.split(",") if part.strip())
        self._allowed = {name: int(count) for name, count in words}
        self.counted: Counter[str] = Counter()
        self._patches = [
            mock.patch.object(LocalRanks, "_start", self._counting(LocalRanks._start)),
            mock.patch.object(subprocess.Popen, "__init__", self._counting_comfyui(subprocess.Popen.__init__)),
        ]
        for each in self._patches:
            each.start()

    def _counting(self, start: Any) -> Any:
        @functools.wraps(start)
        def counting(ranks: LocalRanks, *args: Any, **kwargs: Any) -> Any:
            self.counted["ranks"] += 1
            return start(ranks, *args, **kwargs)

        return counting

    def _counting_comfyui(self, start: Any) -> Any:
        @functools.wraps(start)
        def counting(process: subprocess.Popen, args: Any, *others: Any, **kwargs: Any) -> None:
            words = [] if isinstance(args, str | bytes) else [str(each) for each in args]
            self.counted["ComfyUI"] += any(word.endswith(SCRIPTS) for word in words)
            start(process, args, *others, **kwargs)

        return counting

    def pytest_unconfigure(self) -> None:
        for each in self._patches:
            each.stop()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # the first of several processes (-n) adds up
            session.config.workeroutput["starts"] = dict(self.counted)
        elif any(self.counted[name] > count for name, count in self._allowed.items()) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        self.counted.update(getattr(node, "workeroutput", {}).get("starts", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name, allowed in self._allowed.items():
            text = f"starts: {self.counted[name]} of {name}, {allowed} allowed"
            more = self.counted[name] > allowed
            terminalreporter.write_line(f"FAILED {text} (tests/support/starts.py)" if more else text, red=more)
