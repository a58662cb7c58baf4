"""Finds out whether a class hands its attention to a function that guides it (guided_attention.py), and tries whether ranks
whose classes get ours give what the whole class gives with such a function.

That ours computes what another node's does is shown apart from it, without a model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.call_arguments import OPTIONS
from parallel_backend.own_class.calls.residuals import PATCHES
from parallel_backend.own_class.calls.tried_calls import Call, distance, drawn, entry_of, smaller
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.guided_attention import GUIDED, OUTPUT, Guide, Guided, Sum, own_sums
from parallel_backend.own_class.cuts.stages import StageBlocks
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.own_class.trials.band_trial import bare
from parallel_backend.own_class.trials.call_state import held
from parallel_backend.own_class.trials.change_trial import trial_of_change
from parallel_backend.own_class.trials.feature_trial import Run, Sharing, close
from parallel_backend.own_class.trials.other_calls import is_proven
from parallel_backend.own_class.trials.product_trial import why_no_products
from parallel_backend.own_class.trials.short_model import Short
from parallel_backend.own_class.trials.stage_trial import TOLERANCE, Wholes
from parallel_backend.own_class.trials.token_trial import Runs
from parallel_backend.own_class.trials.whole_run import TensorRank

PROMPTS = "cond_or_uncond"
"""Entry of transformer_options: which prompts a call has."""
SETTINGS = 5.0, 1.5, 0.5
"""Scale, tau and alpha with which it is tried: each of them counts, and no other value is computed elsewhere."""
TOGETHER = "both prompts are in one call"


@dataclass(frozen=True)
class Guidance:
    """What guidance is shown to be."""

    has_effect: bool = False
    """The class hands over its attention."""
    why: str = ""
    """Why it is not proven. Empty: it is."""
    whole_heads: bool = False
    """See NormalizedGuidance."""


class _Native:
    """In the whole class, as another node's function, which guides `prompts` if the class tells it of these. It may tell it
    of others, or of none: ranks do not hear of that."""

    def __init__(self, guidance: NormalizedGuidance, prompts: Any):
        self._guide, self._prompts, self.calls = Guide(Guided(guidance)), prompts, 0

    def __call__(self, out_BSC: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        self.calls += 1
        return self._guide(out_BSC, options) if options.get(PROMPTS) == self._prompts else out_BSC


PARTS, WHOLE = "parts", "whole"
"""Tensor ranks have parts of the whole's channels, or all of them each."""


class HeldSums:
    """Guided.add_up of tensor ranks that run one after the other: each goes on with the whole's sums, and the ranks' own
    have to add up to these, or to be these everywhere."""

    def __init__(self) -> None:
        self.ways = {PARTS, WHOLE}
        """What ranks may have by all runs so far."""
        self._are_whole = True
        self._whole: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._rank: TensorRank | None = None
        self._next = 0

    def begin(self, rank: TensorRank | None) -> None:
        """A run begins, of this rank, or of the whole that the next ranks are held against."""
        if rank is None:
            self._whole, self._sums, self._are_whole = [], [], True
        self._rank, self._next = rank, 0

    def add_up(self, sums: torch.Tensor) -> torch.Tensor:
        if self._rank is None:
            self._whole.append(sums.clone())
            return sums
        number, self._next = self._next, self._next + 1
        if number >= len(self._whole) or self._whole[number].shape != sums.shape:
            raise Unproven("a rank guides its attention at other places than the whole")
        if number == len(self._sums):
            self._sums.append(torch.zeros_like(sums))
        self._sums[number] += sums
        self._are_whole = self._are_whole and close(sums, self._whole[number])
        return self._whole[number].clone()

    def why_not(self) -> str:
        """What is wrong with the ranks' sums. Empty: nothing."""
        add_up = all(map(close, self._sums, self._whole))
        self.ways -= {*([] if add_up else [PARTS]), *([] if self._are_whole else [WHOLE])}
        is_whole = len(self._sums) == len(self._whole) and self.ways
        return "" if is_whole else "the ranks' sums do not add up to the whole's if its attention is guided"


class _GuidedSharing(Sharing):
    """Whose calls are guided with sums by `held`."""

    def __init__(self, model: nn.Module, blocks: Sequence[OwnBlock], call: Call, ranks: int):
        self.held = HeldSums()
        super().__init__(model, blocks, [call], ranks)

    def why_not_in(self, run: Run) -> str:
        def of_rank(rank: TensorRank | None) -> Any:
            self.held.begin(rank)
            return run(rank)

        why = super().why_not_in(of_rank) or self.held.why_not()
        self.held.begin(None)  # a whole call may come next
        return why


def trial_of_guidance(
    own: OwnClass,
    proof: Proof,
    call: Call,
    times: Sequence[float],
    prompts: tuple[Span, Span],
    tensor: int = 1,
    poll: Callable[[float], None] = lambda _: None,
) -> Guidance:
    """What guidance is shown to be, with any settings, for calls like `call`, of which `proof` is, on `tensor` ranks that
    share layers. `prompts`: positive and negative entries of the call, which has PROMPTS among its options. `poll`: as in
    `trial`."""
    guidance = NormalizedGuidance(*SETTINGS, *prompts)

    def tried(short: Short, blocks: Sequence[OwnBlock]) -> Guidance:
        return _tried(short, blocks, proof, times, guidance, tensor)

    def failed(why: str) -> Guidance:
        return Guidance(why=f"it does not run guided ({why})")

    return trial_of_change(own, proof, call, tried, failed, poll, tensor)


def _tried(
    short: Short,
    blocks: Sequence[OwnBlock],
    proof: Proof,
    times: Sequence[float],
    guidance: NormalizedGuidance,
    tensor: int,
) -> Guidance:
    model = short.model
    calls = [drawn(short.call, 1), *(drawn(short.call, 3, time) for time in times)]
    before, native = held(model), _Native(guidance, short.call.options[PROMPTS])
    wholes = [(each, _with(each, native).run(model)) for each in calls]
    if held(model) != before:
        return Guidance(why="it keeps something from a guided call")
    if not native.calls:
        far = max(distance(whole, each.run(model, options=False)) for each, whole in wholes)
        return Guidance(why="" if far <= TOLERANCE else "it gives another result with a function, but does not call it")
    proof = replace(proof, batch=TOGETHER)
    return guided_on_ranks(short, blocks, proof, times, wholes, partial(_guided, guidance), tensor)


def guided_on_ranks(
    short: Short,
    blocks: Sequence[OwnBlock],
    proof: Proof,
    times: Sequence[float],
    wholes: Wholes,
    on_ranks: Callable[[Call, Sum], Call],
    tensor: int,
) -> Guidance:
    """What ranks are shown to give. `wholes`: calls at no time and at the `times`, and what the class gives guided.
    `on_ranks`: a call as ranks get it, with Guided.add_up."""
    model, actual = short.model, short.actual
    cut = list(blocks) if not proof.sequence else NOT_TRIED
    like, sizes = on_ranks(actual, own_sums), () if proof.sequence else Runs(model, bare(blocks)).sizes(actual)
    whole_proof = replace(proof, batch=TOGETHER)
    for (call, whole), time in zip(wholes, (None, *times), strict=True):
        guided = on_ranks(call, own_sums)
        alone = () if proof.batch else range(len(call.x))
        runs = [(guided, whole), *((entry_of(guided, each), whole[each : each + 1]) for each in alone)]
        if not (far := max(distance(_run(model, blocks, each), out) for each, out in runs)) <= TOLERANCE:
            return Guidance(why=f"ranks that guide it give another result (by {far:.1e} of the largest value)")
        at = () if time is None else (time,)
        tokens = [drawn(smaller(like, *size), 1, *at) for size in sizes]
        if not is_proven(model, (whole_proof, bare(blocks), cut), (guided, whole), like, None, tokens, at):
            return Guidance(why="ranks give another result if it is guided")
    if tensor == 1 or proof.tensor:
        return Guidance(has_effect=True)
    sharing = _GuidedSharing(model, bare(blocks), wholes[0][0], tensor)
    why = _why_not_shared(sharing, short, blocks, proof, [call for call, _ in wholes], on_ranks)
    return Guidance(has_effect=True, why=why, whole_heads=PARTS not in sharing.held.ways)


def _why_not_shared(
    sharing: _GuidedSharing,
    short: Short,
    blocks: Sequence[OwnBlock],
    proof: Proof,
    calls: Sequence[Call],
    on_ranks: Callable[[Call, Sum], Call],
) -> str:
    """Why ranks that share layers, alone and with a part of the tokens each, are not right. Empty: they are."""
    model, add_up = short.model, sharing.held.add_up
    found = sharing.of_all(tuple(blocks), {name: range(len(names)) for name, names in _by_list(blocks).items()})
    if sharing.why or any(_layers(a) != _layers(b) for a, b in zip(found, blocks, strict=True)):
        return sharing.why or "its layers are shared in another way than in the trial"
    for call in calls:
        if why := sharing.why_not_in(partial(_run_of_rank, model, blocks, on_ranks(call, add_up))):
            return why
    if proof.sequence:
        return ""
    like = on_ranks(short.actual, add_up)
    of_ranks, of_bands = why_no_products(sharing, model, bare(blocks), blocks, proof.latent, like, sequence=True)
    return of_ranks or of_bands


def _by_list(blocks: Sequence[OwnBlock]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for block in blocks:
        found.setdefault(block.name.rpartition(".")[0], []).append(block.name)
    return found


def _layers(block: OwnBlock) -> tuple[Any, ...]:
    """What ranks share of it, without the widths, which are a tried model's."""
    return [(cut.layer, cut.kind) for cut in block.cuts], block.divided, block.headed


def _with(call: Call, native: _Native) -> Call:
    """The call with a function that ranks do not get."""
    return replace(call, options={**call.options, PATCHES: {OUTPUT: [native]}})


def _guided(guidance: NormalizedGuidance, call: Call, add_up: Sum) -> Call:
    """The call as ranks get it."""
    return replace(call, named={**call.named, OPTIONS: {**call.named.get(OPTIONS, {}), GUIDED: Guided(guidance, add_up)}})


def _run_of_rank(model: nn.Module, blocks: Sequence[OwnBlock], call: Call, _rank: TensorRank | None) -> Any:
    return _run(model, blocks, call)


def _run(model: nn.Module, blocks: Sequence[OwnBlock], call: Call) -> Any:
    """The output of one stage with all blocks."""
    stage = StageBlocks(model, bare(blocks), Span(0, len(blocks)), None)
    try:
        return call.run(stage.call, options=False)
    finally:
        stage.remove()
