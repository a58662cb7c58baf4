"""Tries whether stages of one block each, and entries of the batch on their own, give what the whole model gives."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.tried_calls import Call, entry_of
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.guided_attention import Sum, own_sums
from parallel_backend.own_class.cuts.stages import StageBlocks, Wanted
from parallel_backend.own_class.cuts.token_cut import TokenCut
from parallel_backend.own_class.trials.comparison import difference, first_why_not

WholeOutputs = Sequence[tuple[Call, Any]]
"""Calls, and the whole model's output for each."""


class Mailbox:
    """The link between stages that run one after the other in one process."""

    def __init__(self) -> None:
        self._sent: list[tuple[torch.Tensor, int]] = []

    def send(self, tensor: torch.Tensor) -> None:
        self._sent.append((tensor, tensor._version))

    def receive(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [self._next(*each) for each in wanted]

    def _next(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if not self._sent:
            raise Unproven("a stage waits for a value that is not sent")
        tensor, version = self._sent.pop(0)
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise Unproven(f"a stage sends {list(tensor.shape)}, but {list(shape)} is expected")
        if tensor._version != version:
            raise Unproven("a value is written to after it was sent")
        return tensor.clone()


def why_not_staged(model: nn.Module, blocks: Sequence[OwnBlock], wholes: WholeOutputs) -> str:
    """Why stages are not proven, which are of one block each. Empty: they are."""
    return first_why_not((partial(_by_stages, model, blocks, *each) for each in wholes), "a stage does not run")


def run_in_one(
    model: nn.Module, blocks: Sequence[OwnBlock], call: Call, cut: TokenCut | None = None, add_up: Sum = own_sums
) -> Any:
    """The output of one stage with all blocks, without ComfyUI's transformer_options. `cut`: of its tokens. `add_up`: of
    guided attention."""
    with closing(StageBlocks(model, blocks, Span(0, len(blocks)), None, cut)) as stage:
        stage.add_up = add_up
        return call.run(stage.call, options=False)


def _by_stages(model: nn.Module, blocks: Sequence[OwnBlock], call: Call, whole: torch.Tensor) -> str:
    mailbox, out = Mailbox(), None
    for number in range(len(blocks)):
        with closing(StageBlocks(model, blocks, Span(number, number + 1), mailbox)) as stage:
            out = call.run(stage.call, options=False)
    return "stages return nothing" if out is None else difference("stages give a different result", out, whole)


def why_not_by_entry(model: nn.Module, wholes: WholeOutputs) -> str:
    """Why entries of the batch on their own are not proven. Empty: they are."""

    def tried(call: Call, whole: torch.Tensor, entry: int) -> str:
        out = entry_of(call, entry).run(model, options=False)
        return difference("a single entry of a batch gives a different result", out, whole[entry : entry + 1])

    alone = (partial(tried, *each, entry) for each in wholes for entry in range(len(each[0].x)))
    return first_why_not(alone, "a single entry of a batch does not run")
