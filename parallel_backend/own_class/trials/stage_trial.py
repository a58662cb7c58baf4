"""Tries whether stages of one block each, and entries of the batch on their own, give what the whole model gives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.tried_calls import Call, distance, entry_of
from parallel_backend.own_class.calls.unproven import Unproven, first_line
from parallel_backend.own_class.cuts.stages import StageBlocks, Wanted

TOLERANCE = 1e-5
"""Largest difference between shared and whole, as a share of the largest value."""
Wholes = Sequence[tuple[Call, Any]]
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


def why_not_staged(model: nn.Module, blocks: Sequence[OwnBlock], wholes: Wholes) -> str:
    """Why stages are not proven, which are of one block each. Empty: they are."""
    for call, whole in wholes:
        mailbox, out = Mailbox(), None
        for number in range(len(blocks)):
            stage = StageBlocks(model, blocks, Span(number, number + 1), mailbox)
            try:
                out = call.run(stage.call, options=False)
            except Unproven as unproven:
                return str(unproven)
            except Exception as error:  # of any kind, since its code is not known
                return f"a stage does not run ({first_line(error)})"
            finally:
                stage.remove()
        if not (far := distance(out, whole)) <= TOLERANCE:
            return f"stages give another result (by {far:.1e} of the largest value)"
    return ""


def why_not_by_entry(model: nn.Module, wholes: Wholes) -> str:
    """Why entries of the batch on their own are not proven. Empty: they are."""
    for call, whole in wholes:
        for entry in range(len(call.x)):
            try:
                far = distance(entry_of(call, entry).run(model, options=False), whole[entry : entry + 1])
            except Exception as error:  # of any kind, since its code is not known
                return f"a single entry of a batch does not run ({first_line(error)})"
            if not far <= TOLERANCE:
                return f"a single entry of a batch gives another result (by {far:.1e} of the largest value)"
    return ""
