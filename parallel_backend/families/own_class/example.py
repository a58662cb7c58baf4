"""The call of a class that a trial was made for, as an example: its conditioning, and calls like it with fewer tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from .call_arguments import to_tensors
from .call_form import LATENTS
from .counts import Counts, counted
from .residuals import CONTROL
from .tried_calls import Call, entry_of, smaller, with_whole_axes

if TYPE_CHECKING:
    from .family import OwnClassFamily


def one_entry(call: Call) -> Call:
    """The call's first entry, in host memory, without what ranks do not get and without a ControlNet."""
    one = entry_of(replace(call, named={**call.named, CONTROL: None}), 0)
    named = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(one.named))
    return replace(one, x=one.x.cpu(), timestep=one.timestep.cpu(), named=named, options={})


def conditioning(call: Call) -> dict[str, torch.Tensor]:
    """The conditioning tensors of a call of the whole latent."""
    return to_tensors(call.named, call.timestep, () if LATENTS in call.named else call.x.shape[1:])


def timed_calls(family: "OwnClassFamily", rows: Sequence[int], columns: int, text: int) -> list[tuple[Call, Counts]]:
    """The example's first entry cut to each of `rows` rows of `columns` tokens and `text` words, and what it takes. It gets
    no more than it has. Empty: there is no example, or the class cannot be counted or cut so."""
    if family.call is None:
        return []
    own, call = family.own, one_entry(family.call)
    if (whole := counted(own, call)) is None:
        return []
    call = with_whole_axes(call, lambda each: counted(own, each) is not None)
    sizes = call.latents[0].shape[2:]
    side = family.patching.side
    if own.latent is None:
        side = max(1, round(math.sqrt(math.prod(sizes) * family.hidden / whole.states)))
    frames = (family.patching.frames,) if own.video else ()
    most = min(max(rows), math.ceil(sizes[-2] / side))
    found = []
    for count in rows:
        cut = smaller(call, (*frames, side * max(1, most * count // max(rows)), side * columns), text)
        if (counts := counted(own, cut)) is None:
            return []
        found.append((cut, counts))
    return found
