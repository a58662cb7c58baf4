"""The call of a class that a trial was made for, as an example: its conditioning, and calls like it with fewer tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

from parallel_backend.families.base.step_inputs import Config

from .call_arguments import to_tensors
from .call_form import LATENTS
from .counts import Counts, counted
from .family import OwnClassFamily
from .residuals import CONTROL
from .tried_calls import Call, entry_of, smaller, with_whole_axes


def with_example(family: OwnClassFamily, call: Call) -> OwnClassFamily:
    """The family, whose example is this call. Its tensors are only looked at when they are asked for."""
    latents, patching = call.latents, family.patching

    def example(_config: Config, _text_tokens: int) -> dict[str, torch.Tensor]:
        return conditioning(one_entry(call))

    if patching.companion is not None and len(latents) > 1:
        sizes = tuple(latents[1].shape[1:])
        patching = replace(patching, companion=replace(patching.companion, sizes=lambda _frames: sizes))
    return replace(
        family,
        inputs=replace(family.inputs, example=example),
        sizes=replace(family.sizes, latent_channels=lambda _config: latents[0].shape[1]),
        patching=patching,
        call=call,
    )


def one_entry(call: Call) -> Call:
    """The call's first entry, in host memory, without what ranks do not get and without a ControlNet."""
    one = entry_of(replace(call, named={**call.named, CONTROL: None}), 0)
    named = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(one.named))
    return replace(one, x=one.x.cpu(), timestep=one.timestep.cpu(), named=named, options={})


def conditioning(call: Call) -> dict[str, torch.Tensor]:
    """The conditioning tensors of a call of the whole latent."""
    return to_tensors(call.named, call.timestep, () if LATENTS in call.named else call.x.shape[1:])


def timed_calls(family: OwnClassFamily, rows: Sequence[int], columns: int, text: int) -> list[tuple[Call, Counts]]:
    """The example's first entry cut to each of `rows` rows of `columns` tokens and `text` words, and what it takes. It gets
    no more than it has. Empty: there is no example, or the class cannot be counted or cut so."""
    if family.own is None or family.call is None:
        return []
    own, call = family.own, one_entry(family.call)
    if (whole := counted(own, call)) is None:
        return []
    call = with_whole_axes(call, lambda each: counted(own, each) is not None)
    sizes = call.latents[0].shape[2:]
    side = family.patching.side
    if own.latent is None:
        side = max(1, round(math.sqrt(math.prod(sizes) * family.sizes.hidden({}) / whole.states)))
    frames = (family.patching.frames,) if own.video else ()
    most = min(max(rows), math.ceil(sizes[-2] / side))
    found = []
    for count in rows:
        cut = smaller(call, (*frames, side * max(1, most * count // max(rows)), side * columns), text)
        if (counts := counted(own, cut)) is None:
            return []
        found.append((cut, counts))
    return found
