"""Evaluates the conditionings of a step concurrently if ComfyUI cannot join them to one model call.

ComfyUI makes one model call after the other for conditionings that it cannot join (prompts of different length, areas). A
CALC_COND_BATCH wrapper splits them into parts and has ComfyUI evaluate each part separately. A part's model call is sent to
the ranks; before it waits for the answer, it starts the next part. So one thread keeps all replicas and pipeline stages
busy. Model calls and the result are the same as without the wrapper. Context windows are parts too (concurrent_windows.py).
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import comfy.model_patcher
import comfy.patcher_extension
import comfy.samplers
import torch

from ...ui.other_nodes import is_known
from ..patches.sparse_attention import PREPARE

WRAPPER_KEY = "parallel_dit_concurrent_conds"
EVALUATION_KEY = "parallel_dit_evaluation"
"""Key in `transformer_options` under which the model calls carry their `Evaluation`. A call without it is evaluated by
itself."""

ONE_BY_ONE = ("hooks", "default", "gligen")
"""Keys of a conditioning for which ComfyUI keeps a state from one evaluation to the next."""


class Evaluation:
    """One evaluation of a step: of its conditionings, or of several context windows, each with its conditionings."""

    def __init__(self) -> None:
        self._parts: deque[Callable[[], None]] = deque()
        self._entries = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Evaluation":
        return self  # ComfyUI copies transformer_options for each model call: all must share one evaluation

    def first_replica(self, entries: int) -> int:
        """Return the replica for the first of a call's `entries` batch entries, modulo the number of replicas. It counts the
        entries of the step's earlier calls, so that calls of one step go to different replicas."""
        before, self._entries = self._entries, self._entries + entries
        return before

    def start_next(self) -> None:
        """Evaluate the next part, if any. A part's model call does this after it was posted to the ranks."""
        if self._parts:
            self._parts.popleft()()

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Evaluate `parts`, in this order and before those that wait: a window's conditionings before the next window."""
        waiting = len(self._parts)
        self._parts.extendleft(reversed(parts))
        while len(self._parts) > waiting:  # more than once only if a part has no model call
            self.start_next()


def belonging_to(evaluation: Evaluation, model_options: dict[str, Any]) -> dict[str, Any]:
    """A copy of `model_options` for a part of this evaluation, with transformer_options of its own."""
    options = {**model_options.get("transformer_options", {}), EVALUATION_KEY: evaluation}
    return {**model_options, "transformer_options": options}


def add_concurrent_conds(patcher: comfy.model_patcher.ModelPatcher) -> None:
    """Add the wrapper to a parallel MODEL. Its clones have it too."""
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, WRAPPER_KEY, evaluate_concurrently)


def evaluate_concurrently(
    executor, model, conds: list, x_in: torch.Tensor, timestep: torch.Tensor, model_options: dict
) -> list:
    """ComfyUI's CALC_COND_BATCH wrapper: same arguments and result as `calc_cond_batch`."""
    stub = model.diffusion_model
    on_ranks = getattr(stub, "on_ranks", False)  # False: Dual Model CFG Guider hands these options to another MODEL
    if not on_ranks or stub.setup.degrees.batch * stub.setup.degrees.pipe == 1:
        return executor(model, conds, x_in, timestep, model_options)
    others = [wrapper for wrapper in executor.wrappers[executor.idx + 1 :] if wrapper is not evaluate_concurrently]
    if others:  # this wrapper goes inside other nodes' wrappers, which must see each step's evaluation once and whole
        inner = comfy.patcher_extension.WrapperExecutor.new_executor(executor.original, [*others, evaluate_concurrently])
        return inner.execute(model, conds, x_in, timestep, model_options)
    entries = [(index, entry) for index, cond in enumerate(conds) for entry in cond or ()]
    calls = model_calls(entries, x_in, timestep)
    reason = why_sequential(model, [entry for _, entry in entries], model_options) if len(calls) > 1 else None
    together = independent_parts(calls, len(conds)) if reason is None else [set(range(len(conds)))]
    outer: Evaluation | None = model_options.get("transformer_options", {}).get(EVALUATION_KEY)
    if outer is None:  # else other windows keep replicas busy
        at_once = [max((len(call) for call in calls if part.issuperset(call)), default=0) for part in together]
        tell_if_idle(stub, len(x_in) * sum(at_once), reason)
    if len(together) == 1:
        return executor(model, conds, x_in, timestep, model_options)
    results: list[torch.Tensor | None] = [None] * len(conds)

    def evaluate(part: set[int]) -> None:
        part_conds = [cond if index in part else None for index, cond in enumerate(conds)]
        for index, result in enumerate(executor(model, part_conds, x_in, timestep, options)):
            if index in part:
                results[index] = result

    evaluation = outer or Evaluation()
    options = belonging_to(evaluation, model_options)
    evaluation.run([partial(evaluate, part) for part in together])
    return results


def why_sequential(model, entries: list[dict], model_options: dict) -> str | None:
    """Return the reason for the user why the model calls must come one after the other. None: they need not."""
    extension = comfy.patcher_extension
    for entry in entries:
        for key in ONE_BY_ONE:
            if key in entry and entry[key] is not None:
                return f"the conditioning has its own {key}"
    if "multigpu_clones" in model_options:
        return "ComfyUI's own multi-GPU node distributes them"
    if "model_function_wrapper" in model_options:
        return "another node's model_function_wrapper may keep a state from one call to the next"
    if extension.get_all_wrappers(extension.WrappersMP.APPLY_MODEL, model_options, is_model_options=True):
        return "another node's apply_model wrapper may keep a state from one call to the next"
    if model.diffusion_model.wrappers(model_options, is_model_options=True):
        return "another node's wrapper around the diffusion model may keep a state from one call to the next"
    callbacks = model.current_patcher.get_all_callbacks(extension.CallbacksMP.ON_PREPARE_STATE)
    if not all(is_known(PREPARE, callback) for callback in callbacks):
        return "another node is notified of each call"
    return None


def model_calls(entries: list[tuple[int, dict]], x_in: torch.Tensor, timestep: torch.Tensor) -> list[list[int]]:
    """For each model call, the indices of the conditionings that ComfyUI joins to it. `entries`: (index of the conditioning,
    entry)."""
    if len(entries) < 2:
        return [[index for index, _ in entries]]
    areas = [(index, comfy.samplers.get_area_and_mult(entry, x_in, timestep)) for index, entry in entries]
    remaining = [(index, area) for index, area in areas if area is not None]  # None: not evaluated at this timestep
    calls = []
    while remaining:
        first = remaining[0][1]
        joins = [comfy.samplers.can_concat_cond(area, first) for _, area in remaining]
        calls.append([index for (index, _), joined in zip(remaining, joins, strict=True) if joined])
        remaining = [entry for entry, joined in zip(remaining, joins, strict=True) if not joined]
    return calls


def independent_parts(calls: list[list[int]], count: int) -> list[set[int]]:
    """Return disjoint sets of the conditionings 0 .. count - 1, in the order of the calls. No call needs two of the sets.
    Conditionings without a call are in the first set."""
    parts: list[set[int]] = []
    for call in calls:
        touched = [part for part in parts if part & set(call)]
        if touched:
            touched[0].update(call, *touched[1:])
            parts = [part for part in parts if part not in touched[1:]]
        else:
            parts.append(set(call))
    rest = set(range(count)).difference(*parts)
    return [parts[0] | rest, *parts[1:]] if parts else [rest]


def tell_if_together(stub) -> None:
    """Tell the user, once in a sampling run, that NAG needs both prompts on one replica, so that the others are idle."""
    replicas = stub.setup.degrees.batch
    if not stub.run.told_of_idle and replicas > 1:
        _tell(
            stub,
            f"split_batch_degree {replicas}, but NAG needs both prompts in one call, so 1 of {replicas} copies of the "
            "model computes them. To split one image over GPUs, use pipefusion_degree or ulysses_degree instead.",
        )


def tell_if_idle(stub, busy: int, reason: str | None) -> None:
    """Tell the user, once in a sampling run, that a step has work for only `busy` of the replicas."""
    replicas = stub.setup.degrees.batch
    if stub.run.told_of_idle or not 0 < busy < replicas:
        return
    text = f"split_batch_degree {replicas}, but there is work for only {busy} of {replicas} copies of the model at a time"
    if reason is None:
        text += ". Raise batch_size. To split one image over GPUs, use pipefusion_degree or ulysses_degree instead."
    else:
        text += f", since {reason}."
    _tell(stub, text)


def _tell(stub, text: str) -> None:
    stub.run.told_of_idle = True
    stub.run.tell(text)
