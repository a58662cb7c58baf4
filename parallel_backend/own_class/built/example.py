"""The call of a class that a trial was made for, as an example: calls like it with fewer tokens."""

import math
from collections.abc import Sequence

from parallel_backend.own_class.built.built_class import BuiltClass
from parallel_backend.own_class.built.counts import Counts, counted
from parallel_backend.own_class.calls.tried_calls import Call, one_entry, smaller, with_whole_axes


def timed_calls(built: BuiltClass, rows: Sequence[int], columns: int, text: int) -> list[tuple[Call, Counts]]:
    """The example's first entry cut to each of `rows` rows of `columns` tokens and `text` words, and what it takes. It gets
    no more than it has. Empty: there is no example, or the class cannot be counted or cut so."""
    if built.call is None:
        return []
    own, call = built.own, one_entry(built.call)
    if (whole := counted(own, call)) is None:
        return []
    call = with_whole_axes(call, lambda each: counted(own, each) is not None)
    sizes = call.latents[0].shape[2:]
    side = built.patching.side
    if own.latent is None:
        side = max(1, round(math.sqrt(math.prod(sizes) * built.hidden / whole.states)))
    frames = (built.patching.frames,) if own.video else ()
    most = min(max(rows), math.ceil(sizes[-2] / side))
    found = []
    for count in rows:
        cut = smaller(call, (*frames, side * max(1, most * count // max(rows)), side * columns), text)
        if (counts := counted(own, cut)) is None:
            return []
        found.append((cut, counts))
    return found
