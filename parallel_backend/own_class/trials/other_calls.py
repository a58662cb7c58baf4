"""Checks whether a proof made with some calls of a class is also valid for other calls: with other numbers, or at another
width."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from parallel_backend.own_class.calls.tried_calls import Call, drawn, entry_of, numbers_of, smaller, with_numbers, words_of
from parallel_backend.own_class.plans.proof import Tried
from parallel_backend.own_class.trials.band_trial import check_in_bands
from parallel_backend.own_class.trials.comparison import RANKS, why_not
from parallel_backend.own_class.trials.feature_trial import TensorSharing
from parallel_backend.own_class.trials.stage_trial import check_by_entry, check_staged, module_state, noted_run
from parallel_backend.own_class.trials.token_trial import ENDS, Runs, Size, are_cut

ENOUGH = 3
"""The class must run with this many other values of a number before the number is said not to matter."""


def free_numbers(
    model: nn.Module, best: Tried, call: Call, actual: Call, sharing: TensorSharing | None, sizes: Sequence[Size]
) -> list[str]:
    """Proof.numbers. First all numbers get other, unequal values together. If that proves nothing, each is tried alone."""
    half = max(1, words_of(call) // 2)  # a number may be one of words
    values: dict[str, list[int | float]] = {}
    for name, number in numbers_of(call).items():
        tried = half, number // 2, number - 1, *(number + more for more in range(1, 4))
        others = dict.fromkeys(each for each in tried if each > 0 and each != number)
        ran = [each for each in others if noted_run(model, drawn(with_numbers(call, {name: each}), 1)) is not None]
        if len(ran) >= ENOUGH:
            values[name] = ran[: ENOUGH + 1]

    def are_free(names: Sequence[str]) -> bool:
        for at in range(max(len(values[name]) for name in names)):
            numbers = {name: values[name][(at + place) % len(values[name])] for place, name in enumerate(names)}
            one, like = (with_numbers(each, numbers) for each in (call, actual))
            before, noted = module_state(model), noted_run(model, drawn(one, 1))
            if noted is None or module_state(model) != before:
                return False
            with_tokens = [drawn(smaller(like, *size), 1) for size in sizes]
            if why_not(partial(check_proven, model, best, noted, like, sharing, with_tokens)):
                return False
        return True

    if not values or are_free(list(values)):
        return list(values)
    return [name for name in values if are_free([name])] if len(values) > 1 else []


def check_proven(
    model: nn.Module,
    tried: Tried,
    noted: tuple[Call, Any],
    actual: Call,
    sharing: TensorSharing | None,
    with_tokens: Sequence[Call],
    time: Sequence[float] = (),
) -> None:
    """Raise Unproven if a proof made with other calls is not valid for these.

    `noted`: a call and the uncut model's output. `with_tokens`: calls to run with cut tokens. `actual`: calls like it run in
    bands. If the proof does not cover whole batches, only the first batch entry of `with_tokens` and `actual` is run.
    `time`: timestep of the bands; if given, only the first and the last rank are tried.
    """
    proof, blocks = tried
    if not proof.stages:
        check_staged(model, blocks, [noted])
    if not proof.batch and len(noted[0].x) > 1:
        check_by_entry(model, [noted])
    if sharing is not None:
        sharing.check_call(noted[0])
    if not are_cut(blocks):
        return
    if not proof.batch:
        actual, with_tokens = entry_of(actual, 0), [entry_of(each, 0) for each in with_tokens]
    if proof.latent is not None:
        check_in_bands(model, blocks, proof.latent, actual, *time)
    Runs(model, blocks).check_cut(blocks, with_tokens, ENDS if time else range(RANKS))
