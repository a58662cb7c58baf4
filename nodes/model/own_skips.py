"""Blocks that Skip Layer Guidance skips in ComfyUI's own class, once a trial has shown which ones they are."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from parallel_backend.core.own_class import OwnClass
from parallel_backend.families.own_class.proof import Proof
from parallel_backend.families.own_class.skip_trial import Skips
from parallel_backend.families.own_class.trial import trial_of_skips
from parallel_backend.families.own_class.tried_calls import Call, numbers_of

from ..ui.loading_bar import Elapsed
from .own_calls import on_host, structure
from .reach import Unread, refuse_unread


class OwnSkips:
    """What trials have shown in this process, by structure of a call."""

    def __init__(self) -> None:
        self._known: dict[Any, Skips] = {}
        self._lock = threading.Lock()  # bands ask at once

    def blocks(
        self,
        own: OwnClass,
        lists: Mapping[str, Sequence[str]],
        proof: Proof,
        call: Call,
        sizes: tuple[int, ...],
        times: Sequence[float],
        keys: Mapping[tuple[str, int], Any],
    ) -> tuple[str, ...]:
        """Names of the blocks that `call` skips, of which `proof` is. `lists`: all blocks of the class; `keys`: see
        skipped_keys. ValueError, with the node that skips them, if ranks are not proven to do that."""
        kinds = tuple(sorted({kind for kind, _ in keys}))
        key = structure(call, sizes), tuple(numbers_of(call).items()), proof, kinds
        with self._lock:
            if (found := self._known.get(key)) is None:
                host = Call(call.x.cpu(), call.timestep.cpu(), on_host(call.named), on_host(call.options))
                poll = Elapsed(f"trying skipped blocks of {own.name}, ComfyUI's own class")
                found = self._known[key] = trial_of_skips(own, proof, host, times, kinds, poll)
        if found.why:
            refuse_unread(Unread(f"skipped blocks: {found.why}", function) for function in keys.values())
        of_list = ((lists[found.lists[kind]], number) for kind, number in keys if kind in found.lists)
        return tuple(sorted(names[number] for names, number in of_list if number < len(names)))
