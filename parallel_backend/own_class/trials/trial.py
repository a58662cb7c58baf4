"""Tries a class with the arguments of a user's call: whether stages and split batch give the same as the uncut model.

The tried model (short_model.py) has few blocks of each list, random weights without zeros, and the class's widths or
narrower ones. Float tensors get random values with the call's shapes; numbers, strings and integers are the call's.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.tried_calls import (
    SIZES,
    Call,
    drawn,
    smaller,
    with_tensors_told,
    words_of,
)
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.plans.block_order import (
    NO_LIST,
    Recorded,
    are_mixed,
    blocks_of_all,
    choices,
    last_readers,
    list_of,
    order_of,
    read_by_next,
    recorded_blocks,
)
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof, Tried
from parallel_backend.own_class.trials.band_trial import latent_of, runs_of_bands
from parallel_backend.own_class.trials.comparison import found_or_why, why_not
from parallel_backend.own_class.trials.feature_trial import TensorSharing
from parallel_backend.own_class.trials.known_products import KnownProducts
from parallel_backend.own_class.trials.other_calls import check_proven, free_numbers
from parallel_backend.own_class.trials.short_model import (
    Short,
    give_weights,
    narrow_unet,
    narrowed,
    runs,
    short_model,
    widened,
)
from parallel_backend.own_class.trials.stage_trial import (
    WholeOutputs,
    check_by_entry,
    check_calls_apart,
    check_staged,
    check_without_options,
    module_state,
    noted_run,
)
from parallel_backend.own_class.trials.token_trial import WORDS, Runs, Size, are_cut, cut_tokens, runs_of_ranks

FEW = 4, WORDS
"""Like SIZES, for the one call that is tried at the class's own width."""
RUNS, AT_WIDTH = 600, 80
"""Expected runs of models and blocks: in a trial, and in its second part, which is at the class's own width. The second part
takes the fraction HALF of the time."""
HALF = 0.5
LONG_SKIPS = "its blocks read other blocks' outputs, and it needs all tokens between them"
LEAST_SHARE = 0.75
"""Minimum fraction of the parameters that chosen lists of blocks have. Smaller lists are not chosen to make bands possible,
because all other blocks run whole on every stage."""


@dataclass(frozen=True)
class Found:
    """Result of a trial at one width."""

    proof: Proof
    short: Short
    """The tried model."""
    tried: Sequence[OwnBlock] = ()
    """Blocks of the tried model, with the cut of their tokens if tokens can be cut. Empty: nothing is proven."""
    sizes: tuple[Size, ...] = ()
    """Sizes of the calls with which tokens were cut. Empty: tokens cannot be cut."""
    idle: tuple[str, ...] = ()
    """Lists whose blocks no call runs, such as layers for text that run before the model is called."""


def trial(
    own: OwnClass,
    call: Call,
    times: Sequence[float],
    poll: Callable[[float], None] = lambda _: None,
    sequence: bool = True,
    bands: bool = False,
    tensor: int = 1,
) -> Proof:
    """Return the proof for calls like `call` with its batch size, at these timesteps too. Raises ValueError if the class
    does not run or host memory is too small.

    `sequence`: try tokens split over sequence ranks. `bands`: also try bands. `tensor`: try layers shared by this many
    ranks, if more than one. `poll` is called before each run of the model or a block, with the approximate fraction done. It
    may raise an error to stop the trial.
    """
    with conditions_of_trial(poll) as polled:
        of_class = _Trial(times, polled, sequence, bands, tensor)
        for narrow, of_narrow, factor in narrowed(own, call, tensor):
            with contextlib.suppress(Exception):  # of any kind: its code is not known, and may count on its own widths
                polled.begin(0, HALF)
                found = of_class.found(narrow, of_narrow)
                polled.begin(HALF, 1, AT_WIDTH)
                with KnownProducts():
                    return of_class.at_width(own, found, factor, call)
        polled.begin(0, 1)
        return of_class.found(narrow_unet(own), call).proof


class _Trial:
    """The steps of a trial. Arguments: see `trial`."""

    def __init__(self, times: Sequence[float], poll: "Poll", sequence: bool, bands: bool, tensor: int):
        self._times, self._poll, self._sequence, self._bands, self._tensor = times, poll, sequence, bands, tensor

    def found(self, own: OwnClass, call: Call) -> Found:
        """Return the result for a model of the class with few blocks."""
        short = short_model(own, call, self._poll)
        call = short.call
        calls = [drawn(call, 1), drawn(call, 2), *(drawn(call, 3, time) for time in self._times)]
        try:
            check_calls_apart(short.model, short.build(own), calls)
            with KnownProducts():  # its weights stay as they are from here on
                return self._of_calls(own, short, calls)
        except Unproven as unproven:
            why = str(unproven)
            return Found(Proof((), why, why, why, tensor=why), short)

    def _of_calls(self, own: OwnClass, short: Short, calls: Sequence[Call]) -> Found:
        """The result of these calls of the tried model, which do not depend on each other. Raises Unproven if ranks cannot
        run them."""
        model, call = short.model, short.call
        options: tuple[str, ...] = ()
        wholes = [(each, each.run(model)) for each in calls]
        if why_not(partial(check_without_options, model, wholes)):
            told = with_tensors_told(call)
            options = tuple(name for name in call.options if name not in told.options)
            wholes = [(with_tensors_told(each), whole) for each, whole in wholes]
            check_without_options(model, wholes)
            short = dataclasses.replace(short, call=told, actual=with_tensors_told(short.actual))
        recorded = recorded_blocks(model, short.kept, [wholes[0][0], _of_another_size(model, short.call)])
        (proof, tried), sharing = self._best(own, short, wholes, recorded), None
        if self._tensor > 1 and proof.blocks:
            proof, sharing = self._with_tensor(proof, short, tried, wholes)
        (order, _), odd = recorded
        ran = {block.name for block in order}
        idle = tuple(name for name, names in short.kept.items() if not ran.intersection(names) and name not in odd)
        sizes = Runs(model, tried).sizes(short.actual) if are_cut(tried) else ()
        numbers = tuple(free_numbers(model, (proof, tried), short.call, short.actual, sharing, sizes))
        return Found(dataclasses.replace(proof, numbers=numbers, options=options), short, tried, sizes, idle)

    def _best(self, own: OwnClass, short: Short, wholes: WholeOutputs, recorded: Recorded) -> Tried:
        """Return the best proof over the choices of lists to share (see `choices`), without tensor parallelism."""
        model = short.model
        batch = why_not(partial(check_by_entry, model, wholes))
        found: list[tuple[tuple[bool, ...], Tried]] = []  # with its worth: the most important fact first
        whys, is_enough = [], False
        for shared, share in choices(model, short.lists, short.kept):
            if is_enough and share < LEAST_SHARE:
                break
            in_order, why = found_or_why(partial(order_of, {name: short.kept[name] for name in shared}, *recorded))
            if in_order is None:
                whys.append(why)
                continue
            blocks, stages = _staged(model, in_order, wholes)
            blocks, uncut = self._cut(short, blocks)
            latent, why = None, uncut or NOT_TRIED
            if not uncut and self._bands:
                steady = adapter_of(own.kind).steady
                latent, why = found_or_why(partial(latent_of, model, blocks, short.actual, self._times, steady))
            order = blocks_of_all(blocks, short.lists, short.like)
            if are_mixed(blocks) or (len(order) > len(blocks) and not stages and any(block.until for block in blocks)):
                order, stages = self._of_all_blocks(own, short, order, stages, wholes[0][0])
            # Tensor ranks may share the layers of one of several mixed lists, but not of all.
            is_tried = self._tensor > 1 and are_mixed(blocks)
            by_tensor = not (is_tried and why_not(partial(self._sharing, short, blocks, wholes)))
            worth = not stages, not (self._sequence and uncut), latent is not None, by_tensor
            found.append((worth, (Proof(order, stages, batch, uncut, latent=latent, bands=why), blocks)))
            is_enough = is_enough or all((*worth[:2], by_tensor))
            if is_enough and (latent is not None or not self._bands):
                break
        why = next(iter(whys), NO_LIST)
        nothing: Tried = Proof((), why, batch, why), []
        return max(found, key=lambda each: each[0], default=((), nothing))[1]

    def _cut(self, short: Short, blocks: list[OwnBlock]) -> tuple[list[OwnBlock], str]:
        """Return (the blocks with the cut of their tokens, ""), or (the given blocks, why their tokens cannot be cut)."""
        if not (self._sequence or self._bands):
            return blocks, NOT_TRIED
        cut, why = found_or_why(partial(cut_tokens, short.model, blocks, short.actual, self._times))
        if any(block.until and (block.leaving or block.placed) for block in cut or ()):
            cut, why = None, LONG_SKIPS
        return cut or blocks, why

    def _sharing(self, short: Short, blocks: Sequence[OwnBlock], wholes: WholeOutputs) -> TensorSharing:
        return TensorSharing(short.model, blocks, [call for call, _ in (wholes[0], *wholes[2:])], self._tensor)

    def _with_tensor(
        self, proof: Proof, short: Short, tried: Sequence[OwnBlock], wholes: WholeOutputs
    ) -> tuple[Proof, TensorSharing | None]:
        """Return the proof with layers that tensor ranks share, alone and combined with sequence ranks and bands."""
        sharing, why = found_or_why(partial(self._sharing, short, tried, wholes))
        if sharing is None:
            return dataclasses.replace(proof, tensor=why), None
        proof = dataclasses.replace(proof, blocks=sharing.of_all(proof.blocks, short.like), tensor="")
        if self._sequence and are_cut(tried):
            why = why_not(partial(sharing.check_all, runs_of_ranks(short.model, tried, short.actual)))
            proof = dataclasses.replace(proof, sequence=why)
        if proof.latent is not None:
            runs = runs_of_bands(short.model, tried, proof.latent, short.actual)
            if why := why_not(partial(sharing.check_all, runs)):
                proof = dataclasses.replace(proof, latent=None, bands=why)
        return proof, sharing

    def _of_all_blocks(
        self, own: OwnClass, short: Short, order: Sequence[OwnBlock], stages: str, call: Call
    ) -> tuple[tuple[OwnBlock, ...], str]:
        """Return (all blocks of the class in the order of a call, with OwnBlock.until; why stages of all of them are not
        proven). Unless lists are mixed, the tried blocks do not show which of all blocks read others' outputs."""
        model = build(own)
        give_weights(own, model, self._poll)
        by_name = {block.name: block for block in order}
        (ran,), _ = recorded_blocks(model, {name: short.lists[name] for name in map(list_of, order)}, [call])
        until = last_readers(ran)
        blocks = [dataclasses.replace(by_name[each.name], until=until.get(each.name, "")) for each in ran]
        if are_mixed(blocks):
            return tuple(read_by_next(blocks, {list_of(block) for block in order if block.until})), stages
        return tuple(blocks), why_not(partial(check_staged, model, blocks, [(call, call.run(model))]))

    def at_width(self, own: OwnClass, found: Found, factor: int, call: Call) -> Proof:
        """Return the proof `found` for a model that is `factor` times narrower, changed to the class's own width. Raises
        Unproven if nothing was proven, or if a call at the last timestep gives a wrong result at that width."""
        short, options = found.short, found.proof.options
        if not found.proof.blocks:
            raise Unproven(found.proof.stages)
        model, blocks = short.build(own), widened(found.tried, factor)
        give_weights(own, model, self._poll, found.idle)
        actual = with_tensors_told(call) if options else call
        actual = dataclasses.replace(actual, whole_axes=short.actual.whole_axes, whole_text=short.actual.whole_text)
        before, sizes, last = module_state(model), (FEW, *found.sizes[:1], *SIZES), self._times[-1:]
        calls = (drawn(smaller(actual, *size), 1, *last) for size in sizes)
        why = Unproven("it does not run at its own width, or keeps something from a call")
        # The smallest call that runs, and one more: with few tokens a rank may lack one that the class needs.
        for noted in itertools.islice(filter(None, (noted_run(model, each) for each in calls)), 2):
            if module_state(model) != before:
                break
            try:
                return self._proof_at_width(model, found, blocks, noted, actual, factor)
            except Unproven as unproven:
                why = unproven
        raise why

    def _proof_at_width(
        self, model: nn.Module, found: Found, blocks: list[OwnBlock], noted: tuple[Call, Any], actual: Call, factor: int
    ) -> Proof:
        """See `at_width`. `model`: at the class's own width. `blocks`: its tried ones. `noted`: the uncut run of a call."""
        proof, sharing = dataclasses.replace(found.proof, blocks=tuple(widened(found.proof.blocks, factor))), None
        if self._tensor > 1 and not proof.tensor:
            sharing = TensorSharing(model, blocks, [noted[0]], self._tensor)
            shared = sharing.of_all(proof.blocks, found.short.like)
            layers = ({cut.layer for cut in block.cuts} for block in proof.blocks)
            own_cuts = [tuple(cut for cut in a.cuts if cut.layer in b) for a, b in zip(shared, layers, strict=True)]
            of_rank = [dataclasses.replace(block, cuts=cuts) for block, cuts in zip(shared, own_cuts, strict=True)]
            proof = dataclasses.replace(proof, blocks=tuple(of_rank))
        check_proven(model, (found.proof, blocks), noted, actual, sharing, [noted[0]], self._times[-1:])
        return proof


def _staged(model: nn.Module, blocks: list[OwnBlock], wholes: WholeOutputs) -> tuple[list[OwnBlock], str]:
    """Return (the blocks, why stages are not proven). Mixed blocks get OwnBlock.until if stages need it."""
    stages = why_not(partial(check_staged, model, blocks, wholes))
    if stages and are_mixed(blocks):
        lists = dict.fromkeys(map(list_of, blocks))
        for names in (each for count in range(1, len(lists) + 1) for each in itertools.combinations(lists, count)):
            read = read_by_next(blocks, names)
            if not why_not(partial(check_staged, model, read, wholes)):
                return read, ""
    return blocks, stages


def _of_another_size(model: nn.Module, call: Call) -> Call:
    """Return the call with less text or a smaller latent: in `call` text and image may have equally many tokens."""
    words = words_of(call)
    side, fewer = call.longest, max(1, words - 3)
    others = (smaller(call, *sizes) for sizes in ((side // 2, fewer), (side // 2, words), (side, fewer)))
    return drawn(next((other for other in others if runs(model, other)), call), 1)


@contextlib.contextmanager
def conditions_of_trial(poll: Callable[[float], None]) -> Iterator["Poll"]:
    """Context of a trial. It raises the errors of `poll`. Torch computes with one thread, because the operations are so
    short: on shared cores two threads took 4 times the CPU seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # A sampler calls in inference mode, whose tensors do not say when they are written to.
        with torch.inference_mode(False), torch.no_grad():
            yield Poll(poll)
    except TrialAborted as given_up:
        assert given_up.__cause__ is not None
        raise given_up.__cause__ from None
    finally:
        torch.set_num_threads(threads)


class TrialAborted(BaseException):
    """Ends a trial because `poll` raised an error, its cause. A BaseException, since all errors of the class are caught."""


class Poll:
    """Calls `poll` with the fraction done, estimated from the number of runs so far and the number that most models need."""

    def __init__(self, poll: Callable[[float], None]):
        self._poll = poll
        self.begin(0, 1)

    def begin(self, start: float, end: float, runs: int = RUNS) -> None:
        """The following runs, `runs` of them expected, take the trial from the fraction `start` to `end`."""
        self._start, self._end, self._expected, self._runs = start, end, runs, 0

    def __call__(self, *_: Any) -> None:
        self._runs += 1
        done = min(1, self._runs / self._expected)
        try:
            self._poll(self._start + (self._end - self._start) * done)
        except Exception as error:
            raise TrialAborted from error
