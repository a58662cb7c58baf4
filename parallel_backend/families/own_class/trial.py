"""Tries a class with the arguments of an actual call: whether stages and split batch give what the whole model gives.

The tried model has the class's own widths, random weights without zeros, and few blocks of each list. Tensors are drawn with
the shapes of the call; numbers, words and whole numbers are the call's.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.host_memory import host_memory
from parallel_backend.core.own_class import OwnBlock, OwnClass, OwnLatent
from parallel_backend.core.spans import Span

from .band_trial import NESTED, latent_of, why_not_in_bands
from .block_order import block_lists, choices, order_of, recorded_blocks, shortened, whole_list
from .building import build
from .call_arguments import OPTIONS, from_tensors, structure_of, to_tensors
from .call_form import LATENTS, run
from .feature_trial import Sharing
from .product_trial import why_no_products
from .stages import StageBlocks
from .token_trial import cut_tokens, why_not_cut
from .tried_calls import (
    SIZES,
    Call,
    copied,
    distance,
    draw_weights,
    drawn,
    numbers_of,
    replace_number,
    smaller,
    stored_tables,
    with_tensors_told,
    with_whole_axes,
    words_of,
)
from .unproven import Unproven, first_line

TOLERANCE = 1e-5
"""Largest difference between shared and whole, as a share of the largest value."""
SEED = 0
NOT_TRIED = "it was not tried"
NO_LIST = "it has no list of blocks"
CHANNELS = "model_channels"
"""Argument of UNets: channels of the first block, of which others have multiples."""
NARROW = {CHANNELS: 64}
LEAST_SHARE = 0.75
"""Of the blocks' parameters: fewer are not shared out for the sake of bands, since the others run whole on every stage."""
ENOUGH = 3
"""Other values of a number with which the class has to run, so that it can be said not to matter."""
HELD_DEPTH = 4
"""Of containers in a module's attributes that are looked into."""

Wholes = Sequence[tuple[Call, Any]]
"""Calls, and the whole model's output for each."""


@dataclass(frozen=True)
class Proof:
    """What a trial has shown. An empty text: proven."""

    blocks: tuple[OwnBlock, ...]
    """All blocks of the model. Empty: none could be found."""
    stages: str
    """Why stages are not proven."""
    batch: str
    """Why entries of the batch on their own are not proven."""
    sequence: str
    """Why tokens cut over sequence ranks are not proven, by Ulysses or ring."""
    numbers: tuple[str, ...] = ()
    """Names of the call's numbers of which other values change nothing in this proof, such as a length of text."""
    options: tuple[str, ...] = ()
    """Tensors in ComfyUI's transformer_options that ranks have to get, such as the run's sigmas: the class reads one."""
    latent: OwnLatent | None = None
    """Where the latent's tokens are. None: bands are not proven."""
    bands: str = NOT_TRIED
    """Why bands are not proven."""
    tensor: str = NOT_TRIED
    """Why layers shared by tensor ranks are not proven, for the degree that was asked for."""

    def is_of_all(self, numbers: Collection[str]) -> bool:
        """Whether it holds for calls with any values of these numbers."""
        return set(numbers) <= set(self.numbers)


Tried = tuple[Proof, Sequence[OwnBlock], Sequence[OwnBlock] | str]
"""The proof, and the tried model's blocks: as they are, and with their tokens cut, or why they cannot be."""


def trial(
    own: OwnClass,
    call: Call,
    times: Sequence[float],
    poll: Callable[[], None] = lambda: None,
    sequence: bool = True,
    bands: bool = False,
    tensor: int = 1,
) -> Proof:
    """The proof for calls like `call`, of its batch, at these times too. ValueError where the class does not run at all.

    `sequence`: try tokens cut over sequence ranks; `bands`: and into bands, of the lists of blocks that stages share out.
    `tensor`: try layers shared by so many ranks, of more than one. `poll` is called before each run of the model. It raises
    to give up. ValueError, too, where host memory has no room.
    """

    def polled(*_: Any) -> None:
        try:
            poll()
        except Exception as error:
            raise _GivenUp from error

    try:
        return _trial(own, call, times, polled, sequence, bands, tensor)
    except _GivenUp as given_up:
        assert given_up.__cause__ is not None
        raise given_up.__cause__ from None


class _GivenUp(BaseException):
    """Because of the error that caused it. No error of the class: those are caught, whatever they are."""


def _trial(
    own: OwnClass, call: Call, times: Sequence[float], poll: Callable[..., None], sequence: bool, bands: bool, tensor: int
) -> Proof:
    # A sampler calls in inference mode, whose tensors do not say when they are written to.
    with torch.inference_mode(False), torch.no_grad():
        if own.unet:
            own = narrowed(own)
        model = build(own)
        lists = {} if own.unet else block_lists(model)
        kept = shortened(model, lists)
        _give_weights(own, model, poll)
        if LATENTS in call.named:
            call = with_whole_axes(call, lambda each: _error(model, each) is None)
        actual, tried = call, [smaller(call, *sizes) for sizes in SIZES] + [call]
        if all(_error(model, each) for each in tried):
            del model
            model, kept = build(own), lists  # the class counts on all of its blocks
            _give_weights(own, model, poll)
        errors = ((each, _error(model, each)) for each in tried)
        call, error = next((pair for pair in errors if pair[1] is None), (call, _error(model, call)))
        if error is not None:
            raise ValueError(f"model_name: ComfyUI's class {own.name} does not run in a trial ({error}).")
        calls = [drawn(call, 1), drawn(call, 2), *(drawn(call, 3, time) for time in times)]
        if why := _state(own, model, kept, calls):
            return Proof((), why, why, why, tensor=why)
        wholes = [(each, each.run(model)) for each in calls]
        options: tuple[str, ...] = ()
        if why := _options(model, wholes):
            told = with_tensors_told(call)
            options = tuple(name for name in call.options if name not in told.options)
            wholes = [(with_tensors_told(each), whole) for each, whole in wholes]
            if not options or _options(model, wholes):
                return Proof((), why, why, why, tensor=why)
            call, actual, calls = told, with_tensors_told(actual), [each for each, _ in wholes]
        another = _of_another_size(model, call)
        recorded = recorded_blocks(model, kept, [calls[0], another])
        batch = _batch(model, wholes)
        proofs: list[Tried] = []
        is_enough = False
        for shared, share in choices(model, lists, kept):
            if is_enough and share < LEAST_SHARE:
                break
            found = order_of({name: kept[name] for name in shared}, *recorded)
            if isinstance(found, str):
                proofs.append((Proof((), found, batch, found), [], found))
                continue
            blocks = [block for blocks in found.values() for block in blocks]
            stages = _stages(model, blocks, wholes)
            cut = cut_tokens(model, blocks, actual, times) if sequence or bands else NOT_TRIED
            latent, why = None, cut if isinstance(cut, str) else NOT_TRIED
            if not isinstance(cut, str):
                places = {block.name: block for block in cut}
                found = {name: [places[block.name] for block in blocks] for name, blocks in found.items()}
                if bands:
                    latent, why = latent_of(model, cut, actual, times)
            order = tuple(each for at, blocks in found.items() for each in whole_list(blocks, lists[at]))
            proof = Proof(order, stages, batch, cut if isinstance(cut, str) else "", latent=latent, bands=why)
            proofs.append((proof, blocks, cut))
            is_enough = is_enough or (not stages and not (sequence and isinstance(cut, str)))
            if is_enough and (latent is not None or not bands or why == NESTED):
                break
        none: Tried = (Proof((), NO_LIST, batch, NO_LIST), [], NO_LIST)
        best = max(proofs, key=lambda each: _worth(each[0], sequence), default=none)
        proof, sharing = best[0], None
        if tensor > 1 and proof.blocks:
            sharing = Sharing(model, best[1], [calls[0], *calls[2:]], tensor)
            proof = dataclasses.replace(proof, blocks=sharing.of_all(build(own), proof.blocks), tensor=sharing.why)
            if not sharing.why and not isinstance(tokens := best[2], str):
                of_ranks, of_bands = why_no_products(sharing, model, best[1], tokens, proof.latent, actual, sequence)
                latent = None if of_bands else proof.latent
                proof = dataclasses.replace(proof, sequence=of_ranks, latent=latent, bands=of_bands or proof.bands)
        numbers = tuple(_free_numbers(model, best, call, actual, sharing))
        return dataclasses.replace(proof, numbers=numbers, options=options)


def _free_numbers(model: nn.Module, best: Tried, call: Call, actual: Call, sharing: Sharing | None) -> Iterator[str]:
    """Proof.numbers."""
    for name, number in numbers_of(call).items():
        half = max(1, words_of(call) // 2)  # a number may be one of words
        tried = half, number // 2, number - 1, *(number + more for more in range(1, 4))
        others = dict.fromkeys(each for each in tried if each > 0 and each != number)
        changed = [[replace_number(each, name, other) for each in (call, actual)] for other in others]
        ran = [pair for pair in changed if _error(model, pair[0]) is None][: ENOUGH + 1]
        if len(ran) >= ENOUGH and all(_is_proven(model, best, one, all_of, sharing) for one, all_of in ran):
            yield name


def _is_proven(model: nn.Module, tried: Tried, call: Call, actual: Call, sharing: Sharing | None) -> bool:
    """Whether what is proven for one call holds for this one, too."""
    proof, blocks, cut = tried
    held, one = _held(model), drawn(call, 1)
    wholes = [(one, one.run(model))]
    if _held(model) != held or (not proof.stages and _stages(model, blocks, wholes)):
        return False
    if (not proof.batch and _batch(model, wholes)) or (sharing is not None and not sharing.why and sharing.why_not(one)):
        return False
    if isinstance(cut, str):
        return True
    in_bands = proof.latent is None or not why_not_in_bands(model, cut, proof.latent, actual)
    return in_bands and not why_not_cut(model, blocks, cut, actual)


def narrowed(unet: OwnClass) -> OwnClass:
    """The class with few channels: a UNet is tried with all of its blocks, and single entries do not depend on its width."""
    arguments = json.loads(unet.arguments)
    return dataclasses.replace(unet, arguments=json.dumps(arguments | (NARROW if CHANNELS in arguments else {})))


def _give_weights(own: OwnClass, model: nn.Module, poll: Callable[..., None]) -> None:
    """Weights for a model that has none, if host memory has room for them twice."""
    nbytes, free = 4 * sum(parameter.numel() for parameter in model.parameters()), host_memory()[0]
    if 2 * nbytes > free:
        raise ValueError(
            f"model_name: trying ComfyUI's class {own.name} takes {nbytes / 1e9:.1f} GB of host memory, of which "
            f"{free / 1e9:.1f} GB are free, and half of it is for others. Close other programs, or load it with ComfyUI's "
            "own loader."
        )
    draw_weights(model, SEED)
    model.register_forward_pre_hook(poll)


def _worth(proof: Proof, sequence: bool) -> tuple[bool, ...]:
    """What of it counts, first things first."""
    return bool(proof.blocks), not proof.stages, not (sequence and proof.sequence), proof.latent is not None


def _error(model: nn.Module, call: Call) -> Exception | None:
    """What the class raises for the call: exceptions of any kind, since its code is not known."""
    try:
        drawn(call, 1).run(model)
    except Exception as error:
        return error
    return None


def _of_another_size(model: nn.Module, call: Call) -> Call:
    """The call with fewer words or a smaller latent: text and picture may have as many tokens in `call`."""
    words = words_of(call)
    side, fewer = call.longest, max(1, words - 3)
    others = (smaller(call, *sizes) for sizes in ((side // 2, fewer), (side // 2, words), (side, fewer)))
    return drawn(next((other for other in others if _error(model, other) is None), call), 1)


def _options(model: nn.Module, wholes: Wholes) -> str:
    """Why the class needs entries of transformer_options that ranks do not get. Empty: it does not."""
    for call, whole in wholes:
        try:
            far = distance(call.run(model, options=False), whole)
        except Exception as error:  # of any kind, as in _error
            return f"it does not run without ComfyUI's transformer_options ({first_line(error)})"
        if not far <= TOLERANCE:
            return f"it gives another result without ComfyUI's transformer_options (by {far:.1e} of the largest value)"
    return ""


def _state(own: OwnClass, model: nn.Module, kept: Mapping[str, Sequence[str]], calls: Sequence[Call]) -> str:
    """How calls of the class depend on each other. Empty: they do not. The model's weights are changed."""
    outputs = []
    for call in (*calls[:2], calls[0]):
        given = dataclasses.replace(call, x=call.x.clone(), named=copied(call.named), options=copied(call.options))
        held, arguments = _held(model), _written(given)
        both = {OPTIONS: given.named.get(OPTIONS, {}) | dict(given.options)}
        outputs.append(run(model, given.x, call.timestep.clone(), dict(given.named) | both))
        if changed := [name for name, value in _held(model).items() if held.get(name) != value]:
            return f"it keeps {changed[0]} from call to call"
        after = _written(given)
        if changed := [name for name, value in arguments.items() if after.get(name) != value]:
            return f"it writes into its argument {changed[0]}, of which a rank has a copy"
    if distance(outputs[2], outputs[0]) > 0:
        return "the same call gives another result the second time"
    for parameter in model.parameters():
        parameter.mul_(0.7)
    fresh = build(own)
    if any(len(blocks) < len(list(fresh.get_submodule(name).children())) for name, blocks in kept.items()):
        shortened(fresh, block_lists(fresh))
    for name, module in fresh.named_modules():  # the same memory
        module._parameters.update(model.get_submodule(name)._parameters)
        module._buffers.update(stored_tables(model.get_submodule(name)))
    if distance(calls[1].run(model), calls[1].run(fresh)) > 0:
        return "it keeps results of earlier calls, which another LoRA would make wrong"
    return ""


def _held(model: nn.Module) -> dict[str, Any]:
    """What the model's modules hold beside tensors, whose effect on later calls is tried: a number may count calls up to
    where it matters."""

    def seen(value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            return None
        if isinstance(value, dict) and depth < HELD_DEPTH:
            return tuple((key, seen(each, depth + 1)) for key, each in value.items())
        if isinstance(value, list | tuple) and depth < HELD_DEPTH:
            return tuple(seen(each, depth + 1) for each in value)
        return value if isinstance(value, int | float | str) else None

    return {
        f"{name}.{key}".strip("."): seen(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_modules") and "_hooks" not in key
    }


def _written(call: Call) -> dict[str, Any]:
    """What a call's arguments hold, to compare before and after it. A class may note numbers and words in the options."""
    options = {key: value for key, value in call.options.items() if not isinstance(value, int | float | str | None)}
    found = {}
    for name, value in ({"x": call.x} | dict(call.named) | options).items():
        leaves, structure = pytree.tree_flatten(value)
        plain = (torch.Tensor, int, float, str)
        held = [leaf._version if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves if isinstance(leaf, plain)]
        found[name] = held, str(structure)
    return found


class _Mailbox:
    """The link between stages that run one after the other in one process."""

    def __init__(self) -> None:
        self._sent: list[tuple[torch.Tensor, int]] = []

    def send(self, tensor: torch.Tensor) -> None:
        self._sent.append((tensor, tensor._version))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not self._sent:
            raise Unproven("a stage waits for a value that is not sent")
        tensor, version = self._sent.pop(0)
        if (tuple(tensor.shape), tensor.dtype) != (tuple(shape), dtype):
            raise Unproven(f"a stage sends {list(tensor.shape)} where {list(shape)} is expected")
        if tensor._version != version:
            raise Unproven("a value is written to after it was sent")
        return tensor.clone()


def _stages(model: nn.Module, blocks: Sequence[OwnBlock], wholes: Wholes) -> str:
    """Why stages are not proven, which are of one block each. Empty: they are."""
    for call, whole in wholes:
        mailbox, out = _Mailbox(), None
        for number in range(len(blocks)):
            stage = StageBlocks(model, blocks, Span(number, number + 1), mailbox)
            try:
                out = call.run(stage.call, options=False)
            except Unproven as unproven:
                return str(unproven)
            except Exception as error:  # of any kind, as in _error
                return f"a stage does not run ({first_line(error)})"
            finally:
                stage.remove()
        if not (far := distance(out, whole)) <= TOLERANCE:
            return f"stages give another result (by {far:.1e} of the largest value)"
    return ""


def _batch(model: nn.Module, wholes: Wholes) -> str:
    """Why entries of the batch on their own are not proven. Empty: they are."""
    for call, whole in wholes:
        tensors = to_tensors(call.named, call.timestep)
        for entry in range(len(call.x)):
            rows = slice(entry, entry + 1)
            named = from_tensors({name: tensor[rows] for name, tensor in tensors.items()}, structure_of(tensors))
            own = dataclasses.replace(call, x=call.x[rows], timestep=call.timestep[rows], named=named)
            try:
                far = distance(own.run(model, options=False), whole[rows])
            except Exception as error:  # of any kind, as in _error
                return f"an entry of a batch on its own does not run ({first_line(error)})"
            if not far <= TOLERANCE:
                return f"an entry of a batch on its own gives another result (by {far:.1e} of the largest value)"
    return ""
