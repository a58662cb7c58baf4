"""Tries whether ranks that lead a class away from a second text (second_text.py) give what the whole class gives with a
node's functions in its modules that attend to the prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.calls.tried_calls import Call, drawn, words_of
from parallel_backend.own_class.cuts.guided_attention import Sum, own_sums
from parallel_backend.own_class.cuts.second_text import ADD_UP, LAYERS, SECOND, SETTINGS, TEXT, looks
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.change_trial import trial_of_change
from parallel_backend.own_class.trials.guided_trial import Guidance, guided_on_ranks
from parallel_backend.own_class.trials.short_model import Short

SEED = 5
Node = Callable[[nn.Module, torch.Tensor], Callable[..., torch.Tensor]]
"""(module that attends to the prompt, second text [1, U, hidden], embedded) -> the node's forward of the module."""


def trial_of_second_text(
    own: OwnClass,
    proof: Proof,
    call: Call,
    times: Sequence[float],
    settings: torch.Tensor,
    node: Node,
    tensor: int = 1,
    poll: Callable[[float], None] = lambda _: None,
) -> Guidance:
    """What a second text is shown to be for calls like `call`, of which `proof` is, on `tensor` ranks that share layers.

    `settings`: see SETTINGS, those with which `node` guides. `poll`: as in `trial`."""

    def tried(short: Short, blocks: Sequence[OwnBlock]) -> Guidance:
        return _tried(short, blocks, proof, times, settings, node, tensor)

    def failed(why: str) -> Guidance:
        return Guidance(why=f"it does not run with a second text ({why})")

    return trial_of_change(own, proof, call, tried, failed, poll, tensor)


def _tried(
    short: Short,
    blocks: Sequence[OwnBlock],
    proof: Proof,
    times: Sequence[float],
    settings: torch.Tensor,
    node: Node,
    tensor: int,
) -> Guidance:
    model, own = short.model, short.call.named["context"]
    text = torch.randn(1, words_of(short.call) + 1, own.shape[-1], generator=torch.Generator().manual_seed(SEED))
    calls = [drawn(short.call, 1), *(drawn(short.call, 3, time) for time in times)]
    with _by_node(model, node, text):
        wholes = [(each, each.run(model)) for each in calls]
    return guided_on_ranks(short, blocks, proof, times, wholes, partial(_led_away, text, settings), tensor)


def _led_away(text: torch.Tensor, settings: torch.Tensor, call: Call, add_up: Sum) -> Call:
    """The call as ranks get it."""
    second: dict[str, Any] = {TEXT: text.expand(len(call.x), -1, -1), SETTINGS: settings}
    sums = {} if add_up is own_sums else {ADD_UP: add_up}
    return replace(call, named={**call.named, SECOND: second | sums})


@contextmanager
def _by_node(model: nn.Module, node: Node, text: torch.Tensor) -> Iterator[None]:
    """Context in which the node's functions are in the model."""
    embedded, modules = model.get_submodule(LAYERS)(text), looks(model)
    for module in modules:
        vars(module)["forward"] = node(module, embedded)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]
