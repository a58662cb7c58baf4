"""Progress of starting and loading ranks, on the node that waits for them."""

import functools

import comfy.utils

from .node_text import say


class LoadingBar:
    """A pool.LoadProgress: progress bar and text on the node. Shows nothing as long as nothing is loaded."""

    def __init__(self) -> None:
        self._shown: tuple[str, int] | None = None

    @functools.cached_property
    def _bar(self) -> comfy.utils.ProgressBar:
        """Made at the first progress only, because every model call brings a LoadingBar and few of them load anything."""
        return comfy.utils.ProgressBar(100)

    def __call__(self, doing: str, fraction: float) -> None:
        """Raises ComfyUI's InterruptProcessingException once the user has pressed Cancel."""
        percent = int(100 * fraction)
        if self._shown == (doing, percent):
            return
        self._shown = (doing, percent)
        self._bar.update_absolute(percent)
        say(f"Parallel DiT: {doing}" + f", {percent} %" * (0 < percent < 100))
