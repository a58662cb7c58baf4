"""Shows the progress of long work on the node that waits for it: starting and loading ranks, measuring, trials."""

import functools
import time
from collections.abc import Callable

import comfy.utils

from .host import check_cancelled
from .node_text import say


class LoadingBar:
    """A pool.LoadProgress that shows a progress bar and text on the node. Shows nothing if nothing is loaded."""

    def __init__(self) -> None:
        self._shown: tuple[str, int] | None = None

    @functools.cached_property
    def _bar(self) -> comfy.utils.ProgressBar:
        """Created at the first progress, because every model call creates a LoadingBar and few of them load anything."""
        return comfy.utils.ProgressBar(100)

    def __call__(self, doing: str, fraction: float) -> None:
        """Show the progress. Raises ComfyUI's InterruptProcessingException once the user has pressed Cancel."""
        percent = int(100 * fraction)
        if self._shown == (doing, percent):
            return
        self._shown = (doing, percent)
        self._bar.update_absolute(percent)
        say(f"Parallel DiT: {doing}" + f", {percent} %" * (0 < percent < 100))


class Elapsed:
    """A poll for long work. It checks for Cancel. Once a second it shows the work, its progress and the seconds so far.

    `doing`: the work, or a function that returns the present work. If it is empty, nothing is shown. `patience`: seconds
    after which work is shown.
    """

    def __init__(self, doing: str | Callable[[], str], patience: int = 0) -> None:
        self._doing, self._patience = doing, patience
        self._shown, self._began, self._said = "", 0.0, -1
        self()

    def __call__(self, done: float = 0) -> None:
        """Show the progress. `done`: the fraction that is done, or 0 if unknown. Raises ComfyUI's
        InterruptProcessingException once the user has pressed Cancel."""
        check_cancelled()
        doing, now = self._doing if isinstance(self._doing, str) else self._doing(), time.monotonic()
        if doing != self._shown:
            self._shown, self._began, self._said = doing, now, -1
        seconds, percent = int(now - self._began), int(100 * done)
        if doing and seconds >= self._patience and seconds > self._said:
            self._said = seconds
            share, time_taken = f", {percent} %" * (done > 0 and seconds > 0), f", {seconds} s" * (seconds > 0)
            say(f"Parallel DiT: {doing}{share}{time_taken}")
