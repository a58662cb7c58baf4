"""Tries whether ranks guide a class's attention as other nodes' functions do in the whole class.

ComfyUI's NAGuidance gives the class a function for what its attention gives (guided_attention.py). KJNodes' WanVideoNAG
replaces the modules that attend to the prompt, to lead them away from a second text (second_text.py).
That our function computes what ComfyUI's does is shown apart from it, without a model.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.own_class import OwnBlock
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.call_arguments import OPTIONS
from parallel_backend.own_class.calls.residuals import PATCHES
from parallel_backend.own_class.calls.tried_calls import Call, entry_of, words_of
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.forwards import put_forwards
from parallel_backend.own_class.cuts.guided_attention import GUIDED, OUTPUT, Guide, Sum
from parallel_backend.own_class.cuts.second_text import LAYERS, SECOND, TEXT, prompt_attention
from parallel_backend.own_class.cuts.second_text import SETTINGS as TEXT_SETTINGS
from parallel_backend.own_class.plans.block_order import list_of
from parallel_backend.own_class.trials.band_trial import runs_of_bands
from parallel_backend.own_class.trials.call_state import module_state
from parallel_backend.own_class.trials.change_trial import ChangeTrial, Shown
from parallel_backend.own_class.trials.compared_runs import TensorRank
from parallel_backend.own_class.trials.comparison import close, difference
from parallel_backend.own_class.trials.feature_trial import Run, TensorSharing
from parallel_backend.own_class.trials.other_calls import is_proven
from parallel_backend.own_class.trials.stage_trial import WholeOutputs, run_in_one
from parallel_backend.own_class.trials.token_learning import without_token_cut
from parallel_backend.own_class.trials.token_trial import runs_of_ranks

PROMPTS = "cond_or_uncond"
"""Entry of transformer_options: which prompts a call has."""
SETTINGS = 5.0, 1.5, 0.5
"""Scale, tau and alpha with which it is tried: each of them counts, and no other value is computed elsewhere."""
TOGETHER = "both prompts are in one call"
SEED = 5
"""Seed of a second text."""


class CheckedSums:
    """Checks the sums of tensor ranks that run one after the other, as their StageBlocks.add_up. Each rank gets the whole
    model's sums. Its own must add up to them with the other ranks'."""

    def __init__(self) -> None:
        self._whole: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._rank: TensorRank | None = None
        self._next = 0

    def begin(self, rank: TensorRank | None) -> None:
        """Begin the run of `rank`. None: the run of the whole model, with which the next ranks are compared."""
        if rank is None:
            self._whole, self._sums = [], []
        self._rank, self._next = rank, 0

    def add_up(self, sums: torch.Tensor) -> torch.Tensor:
        if self._rank is None:
            self._whole.append(sums.clone())
            return sums
        number, self._next = self._next, self._next + 1
        if number >= len(self._whole) or self._whole[number].shape != sums.shape:
            raise Unproven("a rank guides its attention at different places from the whole model")
        if number == len(self._sums):
            self._sums.append(torch.zeros_like(sums))
        self._sums[number] += sums
        return self._whole[number].clone()

    def why_not(self) -> str:
        """Why the ranks' sums are wrong. Empty: they are right."""
        add_up = len(self._sums) == len(self._whole) and all(map(close, self._sums, self._whole))
        return "" if add_up else "the ranks' sums do not add up to the whole model's if its attention is guided"


class _GuidedTensorSharing(TensorSharing):
    """TensorSharing of guided calls. `sums`: checks them."""

    def __init__(self, model: nn.Module, blocks: Sequence[OwnBlock], call: Call, ranks: int):
        self.sums = CheckedSums()
        super().__init__(model, blocks, [call], ranks)

    def why_not_in(self, run: Run) -> str:
        def of_rank(rank: TensorRank | None) -> Any:
            self.sums.begin(rank)
            return run(rank)

        why = super().why_not_in(of_rank) or self.sums.why_not()
        self.sums.begin(None)  # a whole call may come next
        return why


class _Guiding(ChangeTrial):
    """A trial of guided attention, by either node."""

    @abstractmethod
    def on_ranks(self, call: Call) -> Call:
        """A call as ranks get it."""

    def compared(self, wholes: WholeOutputs) -> Shown:
        """The result for ranks. `wholes`: `calls`, and the class's guided output for each."""
        proof, model, actual = self.proof, self.short.model, self.on_ranks(self.short.actual)
        tried = replace(proof, batch=TOGETHER), without_token_cut(self.blocks) if proof.sequence else self.blocks
        for (call, whole), time in zip(wholes, [(), *([time] for time in self.times)], strict=True):
            guided = self.on_ranks(call)
            alone = () if proof.batch else range(len(call.x))
            for each, out in [(guided, whole), *((entry_of(guided, at), whole[at : at + 1]) for at in alone)]:
                if why := difference(
                    "ranks that guide it give a different result", run_in_one(model, self.blocks, each), out
                ):
                    return Shown(why)
            if not is_proven(model, tried, (guided, whole), actual, None, self.calls_of_tokens(actual, time), time):
                return Shown("ranks give a different result if it is guided")
        if self.tensor == 1 or proof.tensor:
            return Shown(has_effect=True)
        sharing = _GuidedTensorSharing(model, self.blocks, wholes[0][0], self.tensor)
        why = sharing.why or self._why_not_shared(sharing, [call for call, _ in wholes])
        return Shown(why, has_effect=True)

    def _why_not_shared(self, sharing: _GuidedTensorSharing, calls: Sequence[Call]) -> str:
        """Why ranks that share layers give a different result, with all or a part of the tokens. Empty: they do not."""
        model, blocks, latent, add_up = self.short.model, self.blocks, self.proof.latent, sharing.sums.add_up
        numbers = {name: range(count) for name, count in Counter(map(list_of, blocks)).items()}
        if any(_layers(a) != _layers(b) for a, b in zip(sharing.of_all(tuple(blocks), numbers), blocks, strict=True)):
            return "its layers are cut differently from the trial"
        actual = self.on_ranks(self.short.actual)
        runs = (partial(_run_of_rank, model, blocks, self.on_ranks(call), add_up) for call in calls)
        if (why := sharing.why_not(runs)) or self.proof.sequence:
            return why
        in_bands = () if latent is None else runs_of_bands(model, blocks, latent, actual, add_up)
        return sharing.why_not(runs_of_ranks(model, blocks, actual, add_up)) or sharing.why_not(in_bands)


def _layers(block: OwnBlock) -> tuple[Any, ...]:
    """What ranks share of it, without the widths, which are a tried model's."""
    return [(cut.layer, cut.kind) for cut in block.cuts], block.divided, block.headed


def _run_of_rank(model: nn.Module, blocks: Sequence[OwnBlock], call: Call, add_up: Sum, _rank: TensorRank | None) -> Any:
    return run_in_one(model, blocks, call, None, add_up)


class TrialOfGuidance(_Guiding):
    """The trial of ComfyUI's NAGuidance, for any settings. `prompts`: positive and negative entries of the call, which
    has PROMPTS among its options."""

    fails = "it does not run with guided attention"

    def __init__(self, *given: Any, prompts: tuple[Span, Span], **named: Any):
        super().__init__(*given, **named)
        self.proof = replace(self.proof, batch=TOGETHER)
        self._guidance = NormalizedGuidance(*SETTINGS, *prompts)

    def tried(self) -> Shown:
        model, calls = self.short.model, self.calls
        before, native = module_state(model), _Native(self._guidance, self.short.call.options[PROMPTS])
        functions = {PATCHES: {OUTPUT: [native]}}
        wholes = [(each, replace(each, options={**each.options, **functions}).run(model)) for each in calls]
        if module_state(model) != before:
            return Shown("a guided call changes later calls")
        if native.calls:
            return self.compared(wholes)
        differ = "it gives a different result with a function, but does not call it"
        whys = (difference(differ, each.run(model, options=False), whole) for each, whole in wholes)
        return Shown(next(filter(None, whys), ""))

    def on_ranks(self, call: Call) -> Call:
        options = {**call.named.get(OPTIONS, {}), GUIDED: self._guidance}
        return replace(call, named={**call.named, OPTIONS: options})


class _Native:
    """The node's function, for the whole class. It guides if the class tells it of these `prompts`. The class may also tell
    it of others, or of none, which ranks cannot see."""

    def __init__(self, guidance: NormalizedGuidance, prompts: Any):
        self._guide, self._prompts, self.calls = Guide(guidance), prompts, 0

    def __call__(self, out_BSC: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        self.calls += 1
        return self._guide(out_BSC, options) if options.get(PROMPTS) == self._prompts else out_BSC


Node = Callable[[nn.Module, torch.Tensor], Callable[..., torch.Tensor]]
"""(module that attends to the prompt, second text [1, U, hidden], embedded) -> the node's forward of the module."""


class TrialOfSecondText(_Guiding):
    """The trial of WanVideoNAG's second text. `settings`: see second_text.SETTINGS, those with which `node` guides."""

    fails = "it does not run with a second text"

    def __init__(self, *given: Any, settings: torch.Tensor, node: Node, **named: Any):
        super().__init__(*given, **named)
        self._settings, self._node = settings, node

    def tried(self) -> Shown:
        model, width = self.short.model, self.short.call.named["context"].shape[-1]
        generator = torch.Generator().manual_seed(SEED)
        self._text = torch.randn(1, words_of(self.short.call) + 1, width, generator=generator)
        embedded = model.get_submodule(LAYERS)(self._text)
        with put_forwards((module, self._node(module, embedded)) for module in prompt_attention(model)):
            wholes = [(each, each.run(model)) for each in self.calls]
        return self.compared(wholes)

    def on_ranks(self, call: Call) -> Call:
        second = {TEXT: self._text.expand(len(call.x), -1, -1), TEXT_SETTINGS: self._settings}
        return replace(call, named={**call.named, SECOND: second})
