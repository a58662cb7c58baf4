"""Tries a change inside a class that other nodes ask for, on a model as the class's own trial has it (trial.py)."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.calls.tried_calls import Call, with_tensors_told
from parallel_backend.own_class.calls.unproven import first_line
from parallel_backend.own_class.plans.block_order import tried_blocks
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.own_class.trials.narrow import narrow_unet, narrowed, narrowed_blocks
from parallel_backend.own_class.trials.short_model import Short, short_model
from parallel_backend.own_class.trials.trial import GivenUp, Poll, one_thread


class Change(Protocol):
    """What a change is shown to be."""

    @property
    def why(self) -> str:
        """Why it is not proven. Empty: it is."""


Shown = TypeVar("Shown", bound=Change)


def trial_of_change(
    own: OwnClass,
    proof: Proof,
    call: Call,
    tried: Callable[[Short, Sequence[OwnBlock]], Shown],
    failed: Callable[[str], Shown],
    poll: Callable[[float], None],
    tensor: int = 1,
) -> Shown:
    """What a change is shown to be for calls like `call`, of which `proof` is.

    `tried` says it of a tried model, and the blocks of it that ranks share out; `failed`: of an exception. `poll`, `tensor`:
    as in `trial`."""
    polled, found = Poll(poll), failed(NOT_TRIED)
    call = with_tensors_told(call) if proof.options else call
    whole = narrow_unet(own) if own.unet else own
    try:
        with one_thread(), torch.inference_mode(False), torch.no_grad():
            for kind, of_kind, factor in (*(() if own.unet else narrowed(own, call, tensor)), (whole, call, 1)):
                polled.begin(0, 1)
                try:
                    short = short_model(kind, of_kind, polled)
                    blocks = narrowed_blocks(tried_blocks(proof.blocks, short.lists, short.kept, short.like), factor)
                    found = tried(short, blocks)
                except Exception as error:  # of any kind: its code is not known, and may count on its own widths
                    found = failed(first_line(error))
                if not found.why:
                    return found
    except GivenUp as given_up:
        assert given_up.__cause__ is not None
        raise given_up.__cause__ from None
    return found
