"""Tries a class with the arguments of an actual call: whether stages and split batch give what the whole model gives.

The tried model has the class's own widths or narrower ones (narrow.py), random weights without zeros, and few blocks of each
list. Tensors are drawn with the shapes of the call; numbers, words and whole numbers are the call's.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.tried_calls import (
    SIZES,
    Call,
    does_not_run,
    drawn,
    smaller,
    with_tensors_told,
    words_of,
)
from parallel_backend.own_class.plans.block_order import (
    FEWEST_BLOCKS,
    Likes,
    are_mixed,
    block_lists,
    blocks_of_all,
    choices,
    last_readers,
    likes,
    list_of,
    order_of,
    read_by_next,
    recorded_blocks,
    shortened,
)
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof, Tried
from parallel_backend.own_class.trials.band_trial import latent_of, runs_of_bands
from parallel_backend.own_class.trials.call_state import held, why_not_apart, why_not_without_options
from parallel_backend.own_class.trials.feature_trial import Sharing
from parallel_backend.own_class.trials.narrow import narrow_unet, narrowed, widened
from parallel_backend.own_class.trials.other_calls import free_numbers, is_proven, noted_run
from parallel_backend.own_class.trials.short_model import give_weights, runs, short_model
from parallel_backend.own_class.trials.stage_trial import Wholes, why_not_by_entry, why_not_staged
from parallel_backend.own_class.trials.token_learning import are_cut
from parallel_backend.own_class.trials.token_trial import WORDS, Runs, Size, cut_tokens, runs_of_ranks

FEW = 4, WORDS
"""As SIZES, for the one call that is tried at the class's own width."""
RUNS, AT_WIDTH = 600, 80
"""Runs of models and blocks in a trial, and in that at the class's own width, which takes the other HALF of the time."""
HALF = 0.5
NO_LIST = "it has no list of blocks"
LONG_SKIPS = "its blocks read other blocks' outputs, and it needs all tokens between them"
LEAST_SHARE = 0.75
"""Of the blocks' parameters: fewer are not shared out for the sake of bands, since the others run whole on every stage."""


@dataclass(frozen=True)
class Found:
    """What a trial of one width has found."""

    proof: Proof
    best: Tried | None = None
    """That the proof is of. None: nothing is proven."""
    sizes: tuple[Size, ...] = ()
    """Of calls with which tokens were cut. Empty: they cannot be."""
    whole_axes: frozenset[tuple[int, int]] = frozenset()
    """See Call."""
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the tried blocks, by list."""
    like: Likes = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    """Lists of blocks that no call runs, such as layers that only text passes, before the model is called."""


def trial(
    own: OwnClass,
    call: Call,
    times: Sequence[float],
    poll: Callable[[float], None] = lambda _: None,
    sequence: bool = True,
    bands: bool = False,
    tensor: int = 1,
) -> Proof:
    """The proof for calls like `call`, of its batch, at these times too. ValueError where the class does not run at all.

    `sequence`: try tokens cut over sequence ranks; `bands`: and into bands, of the lists of blocks that stages share out.
    `tensor`: try layers shared by so many ranks, of more than one. `poll` is called before each run of the model or a block,
    with the share that is done, about. It raises to give up. ValueError, too, where host memory has no room.
    """
    asked = sequence, bands, tensor
    with conditions_of_trial(poll) as polled:
        for narrow, of_narrow, factor in () if own.unet else narrowed(own, call, tensor):
            polled.begin(0, HALF)
            try:
                found = _found(narrow, of_narrow, times, polled, *asked)
            except Exception:  # of any kind: its code is not known, and may count on its own widths
                continue
            polled.begin(HALF, 1, AT_WIDTH)
            if (proof := _at_width(own, found, factor, call, times, polled, tensor)) is not None:
                return proof
        polled.begin(0, 1)
        return _found(own, call, times, polled, *asked).proof


@contextlib.contextmanager
def conditions_of_trial(poll: Callable[[float], None]) -> Iterator["Poll"]:
    """Context of a trial, from which errors of `poll` come out. Torch computes with one thread: operations are so short that
    more threads wait for each other, two of them on shared cores for 4 times the CPU seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # A sampler calls in inference mode, whose tensors do not say when they are written to.
        with torch.inference_mode(False), torch.no_grad():
            yield Poll(poll)
    except GivenUp as given_up:
        assert given_up.__cause__ is not None
        raise given_up.__cause__ from None
    finally:
        torch.set_num_threads(threads)


class GivenUp(BaseException):
    """Because of the error that caused it. No error of the class: those are caught, whatever they are."""


class Poll:
    """Tells `poll` how far a trial is, by the runs so far and those that most models take."""

    def __init__(self, poll: Callable[[float], None]):
        self._poll = poll
        self.begin(0, 1)

    def begin(self, start: float, end: float, runs: int = RUNS) -> None:
        """What runs from here on takes the trial from one share to the other."""
        self._start, self._end, self._expected, self._runs = start, end, runs, 0

    def __call__(self, *_: Any) -> None:
        self._runs += 1
        done = min(1, self._runs / self._expected)
        try:
            self._poll(self._start + (self._end - self._start) * done)
        except Exception as error:
            raise GivenUp from error


def _found(
    own: OwnClass, call: Call, times: Sequence[float], poll: Callable[..., None], sequence: bool, bands: bool, tensor: int
) -> Found:
    if own.unet:
        own = narrow_unet(own)
    short = short_model(own, call, poll)
    model, lists, like, kept, actual, call = short.model, short.lists, short.like, short.kept, short.actual, short.call
    error = short.error
    if error is not None:
        raise does_not_run(own, call, str(error))
    calls = [drawn(call, 1), drawn(call, 2), *(drawn(call, 3, time) for time in times)]
    if why := why_not_apart(model, short.another(), calls):
        return Found(Proof((), why, why, why, tensor=why))
    wholes = [(each, each.run(model)) for each in calls]
    options: tuple[str, ...] = ()
    if why := why_not_without_options(model, wholes):
        told = with_tensors_told(call)
        options = tuple(name for name in call.options if name not in told.options)
        wholes = [(with_tensors_told(each), whole) for each, whole in wholes]
        if not options or why_not_without_options(model, wholes):
            return Found(Proof((), why, why, why, tensor=why))
        call, actual, calls = told, with_tensors_told(actual), [each for each, _ in wholes]
    another = _of_another_size(model, call)
    recorded = recorded_blocks(model, kept, [calls[0], another])
    batch, of_sharing = why_not_by_entry(model, wholes), [calls[0], *calls[2:]]
    proofs: list[Tried] = []
    others: list[Tried] = []  # of mixed lists whose layers tensor ranks cannot share, as they may those of one of them
    is_enough = False
    for shared, share in choices(model, lists, kept):
        if is_enough and share < LEAST_SHARE:
            break
        found = order_of({name: kept[name] for name in shared}, *recorded)
        if isinstance(found, str):
            proofs.append((Proof((), found, batch, found), []))
            continue
        blocks, stages = _staged(model, found, wholes)
        cut = cut_tokens(model, blocks, actual, times) if sequence or bands else NOT_TRIED
        if not isinstance(cut, str) and any(block.until and (block.leaving or block.placed) for block in cut):
            cut = LONG_SKIPS
        blocks, uncut = (blocks, cut) if isinstance(cut, str) else (cut, "")
        latent, why = None, uncut or NOT_TRIED
        if not uncut and bands:
            latent, why = latent_of(model, blocks, actual, times, adapter_of(own.kind).steady)
        order = blocks_of_all(blocks, lists, like)
        if are_mixed(blocks) or (len(order) > len(blocks) and not stages and any(block.until for block in blocks)):
            order, stages = _of_all_blocks(own, lists, order, stages, calls[0], poll)
        proof = Proof(order, stages, batch, uncut, latent=latent, bands=why)
        is_other = tensor > 1 and are_mixed(blocks) and bool(Sharing(model, blocks, of_sharing, tensor).why)
        (others if is_other else proofs).append((proof, blocks))
        is_enough = is_enough or not (is_other or stages or (sequence and uncut))
        if is_enough and (latent is not None or not bands):
            break
    none: Tried = (Proof((), NO_LIST, batch, NO_LIST), [])
    best = max([*proofs, *others], key=lambda each: _worth(each[0], sequence), default=none)
    (proof, tried), sharing = best, None
    if tensor > 1 and proof.blocks:
        sharing = Sharing(model, tried, of_sharing, tensor)
        proof = dataclasses.replace(proof, blocks=sharing.of_all(proof.blocks, like), tensor=sharing.why)
        if not sharing.why and are_cut(tried):
            of_ranks = sharing.why_not(runs_of_ranks(model, tried, actual)) if sequence else ""
            of_bands = sharing.why_not(runs_of_bands(model, tried, proof.latent, actual)) if proof.latent else ""
            latent = None if of_bands else proof.latent
            proof = dataclasses.replace(proof, sequence=of_ranks, latent=latent, bands=of_bands or proof.bands)
    ran = {block.name for order in recorded[0] for block in order}
    idle = tuple(name for name, names in kept.items() if not ran.intersection(names) and name not in recorded[1])
    sizes = Runs(model, tried).sizes(actual) if are_cut(tried) else ()
    numbers = tuple(free_numbers(model, best, call, actual, sharing, sizes))
    proof = dataclasses.replace(proof, numbers=numbers, options=options)
    return Found(proof, best, sizes, actual.whole_axes, kept, like, idle)


def _staged(model: nn.Module, blocks: list[OwnBlock], wholes: Wholes) -> tuple[list[OwnBlock], str]:
    """The blocks, and why stages are not proven. Mixed ones with what is read up to the next one of its list."""
    stages = why_not_staged(model, blocks, wholes)
    if stages and are_mixed(blocks):
        lists = dict.fromkeys(map(list_of, blocks))
        for names in (each for count in range(1, len(lists) + 1) for each in itertools.combinations(lists, count)):
            read = read_by_next(blocks, names)
            if not why_not_staged(model, read, wholes):
                return read, ""
    return blocks, stages


def _of_all_blocks(
    own: OwnClass,
    lists: Mapping[str, Sequence[str]],
    order: Sequence[OwnBlock],
    stages: str,
    call: Call,
    poll: Callable[..., None],
) -> tuple[tuple[OwnBlock, ...], str]:
    """The class's blocks `order`, of which some read others' output, with those that do, and in the order of a call; and why
    stages of all are not proven. Few blocks do not show which of all read what, unless they are mixed."""
    model = build(own)
    give_weights(own, model, poll)
    by_name = {block.name: block for block in order}
    (ran,), _ = recorded_blocks(model, {name: lists[name] for name in map(list_of, order)}, [call])
    until = last_readers(ran)
    blocks = [dataclasses.replace(by_name[each.name], until=until.get(each.name, "")) for each in ran]
    if are_mixed(blocks):
        return tuple(read_by_next(blocks, {list_of(block) for block in order if block.until})), stages
    return tuple(blocks), why_not_staged(model, blocks, [(call, call.run(model))])


def _at_width(
    own: OwnClass,
    found: Found,
    factor: int,
    call: Call,
    times: Sequence[float],
    poll: Callable[..., None],
    tensor: int,
) -> Proof | None:
    """What was found with `factor` times narrower blocks, if the class's own width gives it, too, in a call at the last
    time. None: it does not, or nothing was found."""
    if found.best is None or not found.proof.blocks:
        return None
    model = build(own)
    lists = block_lists(model)
    like = likes(model, lists, FEWEST_BLOCKS) | {at: each for at, each in found.like.items() if isinstance(each, range)}
    if are_mixed(found.proof.blocks):  # the first of a list stands for all that run between another's first and last
        most = max(lists, key=lambda name: len(lists[name]))
        like |= {name: [0] * len(names) for name, names in lists.items() if name != most}
    elif any(block.until for block in found.proof.blocks):
        like = dict(found.like)
    kept = shortened(model, lists, like)
    proof, tried = found.best
    places = {
        found.kept[at][found.like[at][like[at].index(number)]]: new
        for at, names in kept.items()
        for number, new in enumerate(names)
    }
    blocks = widened(_at(places, tried), factor)
    give_weights(own, model, poll, found.idle)
    actual = dataclasses.replace(with_tensors_told(call) if found.proof.options else call, whole_axes=found.whole_axes)
    before, sizes = held(model), (FEW, *found.sizes[:1], *SIZES)
    calls = (drawn(smaller(actual, *size), 1, *times[-1:]) for size in sizes)
    noted = next(filter(None, (noted_run(model, each) for each in calls)), None)
    if noted is None or held(model) != before:
        return None
    one = noted[0]
    sharing = Sharing(model, blocks, [one], tensor) if tensor > 1 and not found.proof.tensor else None
    if (sharing is not None and sharing.why) or not is_proven(
        model, (proof, blocks), noted, actual, sharing, [one], times[-1:]
    ):
        return None
    proof = dataclasses.replace(found.proof, blocks=tuple(widened(found.proof.blocks, factor)))
    if sharing is not None:
        shared = sharing.of_all(proof.blocks, like)
        layers = ({cut.layer for cut in block.cuts} for block in proof.blocks)  # one kind may stand for others
        own_cuts = (
            tuple(cut for cut in block.cuts if cut.layer in each) for block, each in zip(shared, layers, strict=True)
        )
        blocks = [dataclasses.replace(block, cuts=cuts) for block, cuts in zip(shared, own_cuts, strict=True)]
        proof = dataclasses.replace(proof, blocks=tuple(blocks), tensor=sharing.why)
    return None if sharing is not None and sharing.why else proof


def _at(places: Mapping[str, str], blocks: Sequence[OwnBlock]) -> list[OwnBlock]:
    """The blocks renamed. `places`: old name -> new name; blocks without a new name are left out.

    Mixed blocks get their `until` again, by the blocks that are left.
    """
    found = [dataclasses.replace(block, name=places[block.name]) for block in blocks if block.name in places]
    if not are_mixed(blocks):
        return found
    read = {list_of(block) for block in blocks if block.until}
    return read_by_next([dataclasses.replace(block, until="") for block in found], read)


def _worth(proof: Proof, sequence: bool) -> tuple[bool, ...]:
    """What of it counts, first things first."""
    return bool(proof.blocks), not proof.stages, not (sequence and proof.sequence), proof.latent is not None


def _of_another_size(model: nn.Module, call: Call) -> Call:
    """The call with fewer words or a smaller latent: text and picture may have as many tokens in `call`."""
    words = words_of(call)
    side, fewer = call.longest, max(1, words - 3)
    others = (smaller(call, *sizes) for sizes in ((side // 2, fewer), (side // 2, words), (side, fewer)))
    return drawn(next((other for other in others if runs(model, other)), call), 1)
