"""Trials of changes that other nodes make inside a class. They use the same small model as the class's own trial (trial.py).

They are skipped blocks (skip layer guidance) and guided attention (guided_attention.py) by ComfyUI's NAGuidance or KJNodes'
WanVideoNAG. A separate test without a model shows that our guidance function computes the same as ComfyUI's.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.core.spans import Span
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.calls.call_arguments import OPTIONS
from parallel_backend.own_class.calls.residuals import BLOCKS, PATCHES, REPLACED
from parallel_backend.own_class.calls.tried_calls import Call, drawn, entry_of, smaller, with_tensors_told, words_of
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.forwards import put_forwards
from parallel_backend.own_class.cuts.guided_attention import GUIDED, LAYERS, OUTPUT, SECOND, TEXT, Guide, prompt_attention
from parallel_backend.own_class.cuts.guided_attention import SETTINGS as TEXT_SETTINGS
from parallel_backend.own_class.cuts.stages import pass_through
from parallel_backend.own_class.plans.block_order import list_of, recorded_blocks, tried_blocks
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.own_class.trials.band_trial import runs_of_bands
from parallel_backend.own_class.trials.comparison import as_unproven, check_equal
from parallel_backend.own_class.trials.feature_trial import Run, TensorSharing
from parallel_backend.own_class.trials.other_calls import check_proven
from parallel_backend.own_class.trials.short_model import Short, narrow_unet, narrowed, short_model, widened
from parallel_backend.own_class.trials.stage_trial import WholeOutputs, module_state
from parallel_backend.own_class.trials.token_trial import Runs, runs_of_ranks, without_token_cut
from parallel_backend.own_class.trials.trial import conditions_of_trial


@dataclass(frozen=True)
class Shown:
    """Result of the trial of a change."""

    why: str = ""
    """Why the change is not proven. Empty: it is proven."""
    has_effect: bool = False
    """Of guidance: whether the class calls the function that guides its attention."""
    lists: Mapping[str, str] = field(default_factory=dict)
    """Of skipped blocks: kind of block -> the list whose numbers it uses. A missing kind has no effect, because the class
    does not look for it."""


class ChangeTrial(ABC):
    """The trial of a change that a node makes, for calls like `call` at its own timestep and at `times`. `proof`: proof for
    such calls without the change. `tensor`: number of ranks that share layers. `poll`: see `trial`."""

    fails: str
    """Beginning of the message if the class raises an error."""

    def __init__(
        self,
        own: OwnClass,
        proof: Proof,
        call: Call,
        times: Sequence[float],
        tensor: int = 1,
        poll: Callable[[float], None] = lambda _: None,
    ):
        self.own, self.proof, self.times, self.tensor, self._poll = own, proof, times, tensor, poll
        self._call = with_tensors_told(call) if proof.options else call
        self.short: Short
        """The tried model."""
        self.blocks: list[OwnBlock]
        """Blocks of the tried model that ranks share."""

    @abstractmethod
    def tried(self) -> Shown:
        """Try the change on `short.model` and return the result. Raises Unproven if ranks would compute something
        different."""

    def shown(self) -> Shown:
        """Return the result for a narrower model. If that proves nothing, the result at the class's own width."""
        own, found = self.own, Shown(NOT_TRIED)
        with conditions_of_trial(self._poll) as poll:
            for kind, call, factor in (*narrowed(own, self._call, self.tensor), (narrow_unet(own), self._call, 1)):
                poll.begin(0, 1)
                try:
                    with as_unproven(self.fails):
                        self._begin(kind, call, factor, poll)
                        return self.tried()
                except Unproven as unproven:  # it may count on its own widths
                    found = Shown(str(unproven))
        return found

    def _begin(self, kind: OwnClass, call: Call, factor: int, poll: Callable[..., None]) -> None:
        """Build a model of this class. `factor`: how many times narrower it is than the proof's."""
        self.short = short_model(kind, call, poll)
        blocks = tried_blocks(self.proof.blocks, self.short.lists, self.short.kept, self.short.like)
        self.blocks = widened(blocks, Fraction(1, factor))
        self._sizes = () if self.proof.sequence else Runs(self.short.model, self.blocks).sizes(self.short.actual)

    @property
    def calls(self) -> list[Call]:
        """Calls of the tried model: with random timesteps, and at each of the trial's `times`."""
        return [drawn(self.short.call, 1), *(drawn(self.short.call, 3, time) for time in self.times)]

    def calls_of_tokens(self, actual: Call, time: Sequence[float] = ()) -> list[Call]:
        """Return calls like `actual` for trying cut tokens. `time`: their timestep, or empty."""
        return [drawn(smaller(actual, *size), 1, *time) for size in self._sizes]


Key = tuple[str, int]
"""(kind of block, its number), as other nodes name a block."""


class TrialOfSkips(ChangeTrial):
    """The trial of blocks that return their arguments: finds those blocks, and whether ranks that skip them give the same
    result.

    `kinds`: kinds of blocks, as other nodes name them. Such a node has the class call its function instead of a block. Ranks
    do not get the function: they call the class as always, and a skipped block returns its arguments.
    """

    fails = "it does not run with skipped blocks"

    def __init__(self, *given: Any, kinds: Sequence[str], **named: Any):
        super().__init__(*given, **named)
        self._kinds = kinds

    def shown(self) -> Shown:
        why = adapter_of(self.own.kind).unskipped
        return Shown(why) if why else super().shown()

    def tried(self) -> Shown:
        model, kept, calls = self.short.model, self.short.kept, self.calls
        before = module_state(model)
        lists: dict[str, str] = {}
        for kind, numbers in self._asked_for(calls[0]).items():
            names = [self._skipped_block(calls[0], (kind, number)) for number in numbers]
            own = next((at for at, of_list in kept.items() if list(of_list) == names), None)
            if own is None or numbers != list(range(len(names))):
                raise Unproven(f"the skipped blocks are not a complete list of blocks in order ({kind})")
            if not {block.name for block in self.blocks}.issuperset(names):
                raise Unproven(f"its blocks in {own} are not shared out")
            lists[kind] = own
        keys = [(kind, number) for kind, at in lists.items() for number in range(len(kept[at]))]
        for together in (*([key] for key in keys), keys):
            names = [kept[lists[kind]][number] for kind, number in together]
            self._check_passed(names, [(call, _with_skipped(call, together)) for call in calls])
        if module_state(model) != before:
            raise Unproven("a call with skipped blocks changes later calls")
        return Shown(lists=lists)

    def _asked_for(self, call: Call) -> dict[str, list[int]]:
        """Return kind of block -> numbers of the replacements that the class calls. Kinds without any are left out."""
        asked: dict[str, list[int]] = {}

        def note(kind: str, number: int, args: Any, more: Mapping[str, Any]) -> Any:
            asked.setdefault(kind, []).append(number)
            return more["original_block"](args)

        most = sum(map(len, self.short.kept.values()))
        keys = [(kind, number) for kind in self._kinds for number in range(most)]
        _replaced(call, {key: partial(note, *key) for key in keys}).run(self.short.model)
        return asked

    def _skipped_block(self, call: Call, key: Key) -> str:
        """Return the name of the block that does not run if `key` is replaced. Empty: none or several do not run."""
        orders, _ = recorded_blocks(self.short.model, self.short.kept, [call, _with_skipped(call, [key])])
        ran, skipping = ({block.name for block in order} for order in orders)
        return min(ran - skipping) if len(ran - skipping) == 1 else ""

    def _check_passed(self, names: Sequence[str], calls: Sequence[tuple[Call, Call]]) -> None:
        """Raise Unproven if ranks give a different result when the blocks `names` return their arguments. `calls`: pairs of
        the call without and with skipped blocks."""
        model, actual = self.short.model, self.short.actual
        wholes = [(call, skipping.run(model)) for call, skipping in calls]
        passed = [block for block in self.blocks if block.name in names]
        cut = [replace(block, attention=()) if block in passed else block for block in self.blocks]
        with pass_through(model, passed):
            for number, (call, whole) in enumerate(wholes):
                out = call.run(model, options=False)
                check_equal("blocks that return their arguments give a different result", out, whole)
                are_cut = not number and not self.proof.sequence  # once: it takes long
                tried = self.proof, cut if are_cut else without_token_cut(self.blocks)
                tokens = self.calls_of_tokens(actual) if are_cut else []
                with as_unproven(self.fails, "ranks give a different result with a skipped block: "):
                    check_proven(model, tried, (call, whole), actual, None, tokens)


def _with_skipped(call: Call, keys: Sequence[Key]) -> Call:
    return _replaced(call, dict.fromkeys(keys, lambda args, _more: args))


def _replaced(call: Call, functions: Mapping[Key, Any]) -> Call:
    """Return the call with these functions in place of blocks."""
    return replace(call, options={**call.options, REPLACED: {BLOCKS: dict(functions)}})


PROMPTS = "cond_or_uncond"
"""Entry of transformer_options: which prompts a call has."""
SETTINGS = 5.0, 1.5, 0.5
"""Scale, tau and alpha of the trial. Each of them changes the result, and they enter no other computation."""
TOGETHER = "both prompts are in one call"
SEED = 5
"""Seed of the random second text."""


class _Guiding(ChangeTrial):
    """A trial of guided attention, by either node."""

    @abstractmethod
    def on_ranks(self, call: Call) -> Call:
        """Return the call as ranks get it."""

    def compared(self, wholes: WholeOutputs) -> Shown:
        """Return the result of comparing ranks with the uncut model. `wholes`: `calls`, each with the uncut model's guided
        output."""
        proof, model, actual = self.proof, self.short.model, self.on_ranks(self.short.actual)
        tried = replace(proof, batch=TOGETHER), without_token_cut(self.blocks) if proof.sequence else self.blocks
        for (call, whole), time in zip(wholes, [(), *([time] for time in self.times)], strict=True):
            guided = self.on_ranks(call)
            alone = () if proof.batch else range(len(call.x))
            for each, out in [(guided, whole), *((entry_of(guided, at), whole[at : at + 1]) for at in alone)]:
                check_equal("ranks that guide it give a different result", Runs(model, self.blocks).run(each), out)
            with as_unproven(self.fails, "ranks give a different result if it is guided: "):
                check_proven(model, tried, (guided, whole), actual, None, self.calls_of_tokens(actual, time), time)
        if self.tensor > 1 and not proof.tensor:
            self._check_shared([call for call, _ in wholes])
        return Shown(has_effect=True)

    def _check_shared(self, calls: Sequence[Call]) -> None:
        """Raise Unproven if tensor ranks give a different result, alone or combined with sequence ranks and bands."""
        model, blocks, latent = self.short.model, self.blocks, self.proof.latent
        sharing = TensorSharing(model, blocks, calls[:1], self.tensor)
        numbers = {name: range(count) for name, count in Counter(map(list_of, blocks)).items()}
        if any(_layers(a) != _layers(b) for a, b in zip(sharing.of_all(tuple(blocks), numbers), blocks, strict=True)):
            raise Unproven("its layers are cut differently from the trial")
        actual = self.on_ranks(self.short.actual)
        runs: list[Iterable[Run]] = [(partial(Runs(model, blocks).run, self.on_ranks(call), None) for call in calls)]
        if not self.proof.sequence:
            runs.append(runs_of_ranks(model, blocks, actual))
            runs.append(() if latent is None else runs_of_bands(model, blocks, latent, actual))
        sharing.check_all(itertools.chain.from_iterable(runs))


def _layers(block: OwnBlock) -> tuple[Any, ...]:
    """Return the layers of a block that tensor ranks share, without widths, because a tried model is narrower."""
    return [(cut.layer, cut.kind) for cut in block.cuts], block.divided, block.headed


class TrialOfGuidance(_Guiding):
    """The trial of ComfyUI's NAGuidance, for any settings. `prompts`: positive and negative batch entries of the call, which
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
            raise Unproven("a guided call changes later calls")
        if native.calls:
            return self.compared(wholes)
        for each, whole in wholes:
            differ = "it gives a different result with a function, but does not call it"
            check_equal(differ, each.run(model, options=False), whole)
        return Shown()

    def on_ranks(self, call: Call) -> Call:
        options = {**call.named.get(OPTIONS, {}), GUIDED: self._guidance}
        return replace(call, named={**call.named, OPTIONS: options})


class _Native:
    """The node's function as it acts in the uncut model. It guides calls whose PROMPTS are `prompts`. The class may also
    call it with others or without any, which ranks would not notice."""

    def __init__(self, guidance: NormalizedGuidance, prompts: Any):
        self._guide, self._prompts, self.calls = Guide(guidance), prompts, 0

    def __call__(self, out_BSC: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        self.calls += 1
        return self._guide(out_BSC, options) if options.get(PROMPTS) == self._prompts else out_BSC


Node = Callable[[nn.Module, torch.Tensor], Callable[..., torch.Tensor]]
"""(module that attends to the prompt, embedded second text [1, U, hidden]) -> the forward that the node gives the module."""


class TrialOfSecondText(_Guiding):
    """The trial of WanVideoNAG's second text. `settings` [B, 3]: scale, tau and alpha of the guidance, which `node` has
    too."""

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
