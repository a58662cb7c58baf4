"""Changes that other nodes make inside ComfyUI's own class, done by ranks after a trial has proven them: skipped blocks
(Skip Layer Guidance) and normalized attention guidance (NAG)."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.calls.tried_calls import Call, entry_of, numbers_of
from parallel_backend.own_class.cuts.guided_attention import IMAGE, SECOND, SETTINGS, TEXT, Guide
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.change_trial import (
    PROMPTS,
    ChangeTrial,
    Shown,
    TrialOfGuidance,
    TrialOfSecondText,
    TrialOfSkips,
)

from ...ui.loading_bar import Elapsed
from ..patches.reach import Unread, refuse_unread
from ..patches.text_guidance import forward_of_node, tried_guidance
from .own_calls import NodeChanges, form, on_host, structure

OTHER_CALL = "a patch calls the model differently from the whole latent in the trial"
CLOSE = 1e-5
"""Largest difference between two functions' results, relative to the largest value."""


class OwnChanges:
    """Results of this process's trials, by structure of a call."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._lock = threading.Lock()  # bands ask at once

    def of(
        self,
        own: OwnClass,
        lists: Mapping[str, Sequence[str]],
        proof: Proof,
        call: Call,
        sizes: tuple[int, ...],
        times: Sequence[float],
        tensor: int,
        asked: NodeChanges,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (fields of BlockChanges, further arguments) for a `call` that has the `proof`. `lists`: all blocks of the
        class. `tensor`: number of ranks that share its layers. Raises ValueError, with the node, if ranks are not proven to
        do what is `asked`."""
        given = own, proof, call, times
        of_call = structure(call, sizes), tuple(numbers_of(call).items()), proof
        fields: dict[str, Any] = {}
        named: dict[str, Any] = {}
        if keys := asked.skipped:
            kinds = tuple(sorted({kind for kind, _ in keys}))
            skips = self._found((of_call, kinds), partial(TrialOfSkips, kinds=kinds), "skipped blocks", *given)
            if skips.why:
                refuse_unread(Unread(f"skipped blocks: {skips.why}", function) for function in keys.values())
            of_list = ((lists[skips.lists[kind]], number) for kind, number in keys if kind in skips.lists)
            fields["skipped"] = tuple(sorted(names[number] for names, number in of_list if number < len(names)))
        if (guidance := asked.guidance) is not None and asked.nag is not None:
            prompts = guidance.positive, guidance.negative
            guided = partial(TrialOfGuidance, prompts=prompts, tensor=tensor)
            shown = self._found((of_call, prompts, tensor), guided, "NAG", *given)
            why = shown.why or ("" if computes(asked.nag, guidance, call) else "its function computes something different")
            if why or asked.skipped:
                refuse_unread([Unread(f"guided attention: {why or 'blocks are skipped, too'}", asked.nag)])
            fields["guidance"] = guidance if shown.has_effect else None
        if (text := asked.text) is not None:
            tried = tried_guidance(text)
            settings = tried.settings(len(call.x))
            node = partial(forward_of_node, tried)
            trial = partial(TrialOfSecondText, settings=settings, node=node, tensor=tensor)
            key = of_call, type(text.node), tuple(settings.flatten().tolist()), tensor
            shown = self._found(key, trial, "WanVideoNAG", *given)
            if shown.why or asked.skipped or asked.guidance:
                why = shown.why or "another node changes the blocks, too"
                refuse_unread([Unread(f"a second text: {why}", text.function)])
            values = text.of(len(call.x))
            named[SECOND] = {TEXT: values[0], SETTINGS: values[1]}
        return fields, named

    def _found(
        self,
        key: Any,
        trial: Callable[..., ChangeTrial],
        what: str,
        own: OwnClass,
        proof: Proof,
        call: Call,
        times: Sequence[float],
    ) -> Shown:
        with self._lock:
            if key not in self._known:
                host = Call(call.x.cpu(), call.timestep.cpu(), on_host(call.named), on_host(call.options))
                poll = Elapsed(f"trying {what} of {own.name}, ComfyUI's own class")
                self._known[key] = trial(own, proof, host, times, poll=poll).shown()
            return self._known[key]


def whole_call(call: Call, known: Call | None, sizes: tuple[int, ...], proof: Proof, asked: NodeChanges) -> Call:
    """Return the whole latent's call that belongs to `call`, which is that of a band. `known`: the tried call of the whole
    latent, if any. Raises NotLocal if `known` does not have the form of `call`."""
    if known is None or form(known, sizes) != form(call, sizes) or (asked.of_batch and len(known.x) != len(call.x)):
        raise NotLocal(OTHER_CALL)
    return known if proof.batch or asked.of_batch else entry_of(known, 0)


def computes(function: Callable[..., torch.Tensor], guidance: NormalizedGuidance, call: Call) -> bool:
    """Whether another node's guidance function computes the same as ranks do with these settings, for a call with these
    prompts."""
    g = torch.Generator().manual_seed(0)
    out_BSC, ours = torch.randn(len(call.x), 5, 8, generator=g), Guide(guidance)
    told = {PROMPTS: call.options[PROMPTS]}
    pairs = [[each(out_BSC.clone(), told | more) for each in (function, ours)] for more in ({}, {IMAGE: [2, 5]})]
    return all(bool((theirs - own).abs().max() <= CLOSE * theirs.abs().max()) for theirs, own in pairs)
