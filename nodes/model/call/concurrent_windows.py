"""Evaluates ComfyUI's context windows concurrently: several windows of a step are on the ranks at the same time.

ComfyUI's handler of context windows (comfy/context_windows.py) evaluates one window after the other and sums the results up.
A SAMPLER_SAMPLE wrapper puts a handler of the same kind in its place. When ComfyUI asks it for a window, it also evaluates
the next ones, as concurrent_conds.py does with conditionings. ComfyUI slices and sums in its own order, so the result is the
same.
"""

from functools import partial
from typing import Any

import comfy.patcher_extension
import torch
from comfy.context_windows import IndexListCallbacks, IndexListContextHandler, IndexListContextWindow

from parallel_backend.client.conditioning_cache import CONDITIONINGS_KEPT

from .concurrent_conds import (
    WRAPPER_KEY,
    Evaluation,
    belonging_to,
    evaluate_concurrently,
    model_calls,
    why_sequential,
)

HANDLER = "context_handler"
"""ComfyUI's key in model_options."""
IN_ORDER = ("execute", "evaluate_context_windows", "combine_context_window_results")
"""Methods of ComfyUI's handler which let a class that overrides them have a window depend on the one before."""
NOTIFIED = (IndexListCallbacks.EVALUATE_CONTEXT_WINDOWS, IndexListCallbacks.COMBINE_CONTEXT_WINDOW_RESULTS)
"""Kinds of callbacks that may keep a state from one window to the next."""


class ConcurrentWindows(IndexListContextHandler):
    """Another handler that evaluates windows concurrently. Made by `like`."""

    _windows: list[tuple[int, IndexListContextWindow]]
    """The step's windows, numbered."""
    _ahead: dict[int, list]
    """By number of a window, its results, which ComfyUI has not asked for yet."""

    @classmethod
    def like(cls, handler: IndexListContextHandler) -> "ConcurrentWindows":
        """Return an object of a class derived from this class and the handler's. It shares all attributes with the handler,
        such as its step."""
        made: ConcurrentWindows = object.__new__(type(cls.__name__, (cls, type(handler)), {}))
        made.__dict__ = vars(handler)
        return made

    def execute(self, *arguments: Any, **named: Any) -> list[torch.Tensor]:
        """Do the same as ComfyUI's method."""
        self._windows, self._ahead = [], {}
        try:
            return super().execute(*arguments, **named)
        finally:
            del self._windows, self._ahead

    def get_context_windows(self, *arguments: Any, **named: Any) -> list[IndexListContextWindow]:
        """Do the same as ComfyUI's method."""
        windows = super().get_context_windows(*arguments, **named)
        self._windows = list(enumerate(windows))
        return windows

    def evaluate_context_windows(
        self, calc_cond_batch, model, x_in, conds, timestep, windows, model_options, *arguments, **named
    ) -> list:
        """Like ComfyUI's method, which asks for one window at a time."""
        ((first, _),) = windows
        if first not in self._ahead:
            evaluate, evaluation = super().evaluate_context_windows, Evaluation()

            def work(window: tuple[int, IndexListContextWindow]) -> None:
                given = x_in, conds, timestep, [window], belonging_to(evaluation, model_options)
                self._ahead[window[0]] = evaluate(calc_cond_batch, model, *given, *arguments, **named)

            count = min(self._at_once(model, conds, x_in, timestep, model_options), len(self._windows))
            if count > 1:
                model.diffusion_model.run.note(f"context windows: {count} at a time")
            evaluation.run([partial(work, window) for window in self._windows[first : first + count]])
        return self._ahead.pop(first)

    def _at_once(self, model, conds: list, x_in: torch.Tensor, timestep: torch.Tensor, model_options: dict[str, Any]) -> int:
        """Maximum number of windows that are evaluated concurrently.

        Together they have two batch entries for each stage of each replica, so that the stages' wait for the last window is
        short. Each of their calls may have its own conditioning, and ranks keep only CONDITIONINGS_KEPT of them.
        """
        stub = model.diffusion_model
        if not getattr(stub, "on_ranks", False):  # Dual Model CFG Guider hands these options to another MODEL
            return 1
        degrees = stub.setup.degrees
        if degrees.batch * degrees.pipe == 1:
            return 1
        if self.split_conds_to_windows:  # each window has one entry of each conditioning
            conds = [cond and cond[:1] for cond in conds]
        entries = [(index, entry) for index, cond in enumerate(conds) for entry in cond or ()]
        if why_sequential(model, [entry for _, entry in entries], model_options) is not None:
            return 1
        kind = comfy.patcher_extension.WrappersMP.CALC_COND_BATCH
        wrappers = comfy.patcher_extension.get_all_wrappers(kind, model_options, is_model_options=True)
        if any(wrapper is not evaluate_concurrently for wrapper in wrappers):
            return 1
        of_window = len(x_in) * sum(map(len, model_calls(entries, x_in, timestep)))
        return max(1, min(2 * degrees.batch * degrees.pipe, CONDITIONINGS_KEPT) // max(1, of_window))


def add_concurrent_windows(patcher) -> None:
    """Add the wrapper to a parallel MODEL. Its clones have it too."""
    kind = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE
    patcher.add_wrapper_with_key(kind, WRAPPER_KEY, sample_in_windows)


def sample_in_windows(executor, guider, sigmas, extra_args: dict[str, Any], *arguments, **named) -> torch.Tensor:
    """ComfyUI's SAMPLER_SAMPLE wrapper: same arguments and result as a sampler's `sample`."""
    options = extra_args["model_options"]
    if is_independent(handler := options.get(HANDLER)):
        options = {**options, HANDLER: ConcurrentWindows.like(handler)}
    return executor(guider, sigmas, {**extra_args, "model_options": options}, *arguments, **named)


def is_independent(handler: Any) -> bool:
    """Whether the handler is ComfyUI's, or another node's whose windows do not depend on the one before."""
    if not isinstance(handler, IndexListContextHandler):
        return False
    own = all(getattr(type(handler), name) is getattr(IndexListContextHandler, name) for name in IN_ORDER)
    callbacks = [comfy.patcher_extension.get_all_callbacks(kind, handler.callbacks) for kind in NOTIFIED]
    return own and not any(callbacks)
