"""The calls of a class in a trial: the user's call made smaller, with random values. Also random weights of the class."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.calls.call_arguments import (
    LATENTS,
    OPTIONS,
    SIGMAS,
    TIMES,
    apart,
    from_tensors,
    joined,
    pack,
    run_call,
    structure_of,
    to_tensors,
    unpack,
)
from parallel_backend.own_class.calls.residuals import CONTROL, of_other_sizes, with_patches

SIZES = (8, 8), (16, 32)
"""(limit of latent rows, columns and frames, limit of text tokens) of a trial's calls. The trial uses the first pair with
which the class runs, otherwise the call's own sizes."""
PIXELS = 1, 8, 16, 0.5
"""Rows of a tensor for each latent row, if it goes with a latent: camera rays and poses have pixels, for example."""
NOISE = 1_000_003
"""Number of random values that fill the weights. It is prime, so that no two rows of a layer are equal."""

NUMBERED = "stg_self_attn_blocks"
"""Entry of transformer_options that lists numbers of blocks. In a trial these are numbers of tried blocks."""
SOME_BLOCKS = [0, 1], [-1, -1], [-1, 1]
"""The block numbers in NUMBERED, by seed of the call. The first call's are no block's, so that cuts are found without
them."""


@dataclass(frozen=True)
class Call:
    """A model call: latent [B, C, (T,) H, W], timestep [B], and named arguments of the class."""

    x: torch.Tensor
    timestep: torch.Tensor
    named: Mapping[str, Any]
    """Named arguments, including the entries of transformer_options that ranks get."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of ComfyUI's transformer_options that ranks do not get."""
    whole_axes: frozenset[tuple[int, int]] = frozenset()
    """(number of a nested latent, its axis after the channels): axes whose sizes the class does not let change."""
    whole_text: bool = False
    """Whether the class runs only with as many text tokens as the call has."""

    def run(self, model: Callable[..., Any], options: bool = True) -> Any:
        """Return the model's output. The model gets copies, so it may write into them. If not `options`, it gets only what
        ranks get."""
        named = copied(dict(self.named))
        if options:
            named[OPTIONS] = named.get(OPTIONS, {}) | copied(dict(self.options))
        return run_call(model, self.x.clone(), self.timestep.clone(), with_patches({OPTIONS: {}} | named))

    @property
    def latents(self) -> list[torch.Tensor]:
        """The call's latents, as views of `x`."""
        return self.parts(self.x)

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the latents in a tensor with the form of `x`, such as an output, as views of it."""
        return unpack(x, self.named[LATENTS]) if LATENTS in self.named else [x]

    def with_latents(self, latents: Sequence[torch.Tensor]) -> "Call":
        """Return the call with other latents, of any sizes."""
        named = dict(self.named)
        if control := named.get(CONTROL):
            named[CONTROL] = of_other_sizes(control, self.latents[0].shape[2:], latents[0].shape[2:])
        if LATENTS not in named:
            return dataclasses.replace(self, x=latents[0], named=named)
        named[LATENTS] = [list(latent.shape[1:]) for latent in latents]
        return dataclasses.replace(self, x=pack(latents, self.x.ndim), named=named)

    @property
    def times(self) -> tuple[torch.Tensor, ...]:
        """The timesteps: one, or one for each latent."""
        told = self.named.get(TIMES)
        return (self.timestep,) if told is None else apart(self.timestep, told)

    def with_times(self, times: Sequence[torch.Tensor]) -> "Call":
        """Return the call with other timesteps, of any shapes."""
        if not isinstance(self.named.get(TIMES), list):
            return dataclasses.replace(self, timestep=times[0])
        named = {**self.named, TIMES: [list(each.shape[1:]) for each in times]}
        return dataclasses.replace(self, timestep=joined(times), named=named)

    @property
    def longest(self) -> int:
        """Longest side of all latents, not counting `whole_axes`."""
        return max(
            side
            for number, latent in enumerate(self.latents)
            for axis, side in enumerate(latent.shape[2:])
            if (number, axis) not in self.whole_axes
        )


def with_tried_blocks(options: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """Return the entries of transformer_options, with numbers of tried blocks in NUMBERED if there is such an entry."""
    return {**options, NUMBERED: SOME_BLOCKS[seed % len(SOME_BLOCKS)]} if NUMBERED in options else dict(options)


def with_tensors_told(call: Call) -> Call:
    """Return a copy of the call in which ranks also get all tensors in ComfyUI's transformer_options."""
    told = {name: value for name, value in call.options.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in call.options.items() if name not in told}
    return dataclasses.replace(call, named={**call.named, OPTIONS: call.named.get(OPTIONS, {}) | told}, options=others)


APART = OPTIONS, LATENTS, TIMES
"""Arguments that `numbers_of` ignores."""


def numbers_of(call: Call) -> dict[str, int | float]:
    """Return the plain numbers among the arguments: "name", "name/key" in a dictionary, or "name/0" in a list -> number."""
    found = {name: value for name, value in call.named.items() if name not in APART}
    inside = {name: value for name, value in found.items() if isinstance(value, dict)}
    inside |= {name: dict(enumerate(value)) for name, value in found.items() if isinstance(value, list | tuple)}
    found |= {f"{name}/{key}": each for name, entries in inside.items() for key, each in entries.items()}
    return {name: value for name, value in found.items() if type(value) in (int, float)}


def with_numbers(call: Call, numbers: Mapping[str, float]) -> Call:
    """Return a copy of the call with `numbers` in place of its own numbers. Keys are those of `numbers_of`."""
    named = dict(call.named)
    for path, number in numbers.items():
        name, _, key = path.partition("/")
        value = named[name]
        if isinstance(value, list | tuple):
            named[name] = [number if str(at) == key else each for at, each in enumerate(value)]
        else:
            named[name] = {**value, key: number} if key else number
    return dataclasses.replace(call, named=named)


def with_whole_axes(call: Call, runs: Callable[[Call], bool]) -> Call:
    """Return the call with its `whole_axes`: the axes of the second and later latents with which the class only runs at full
    size. `runs`: whether the class runs with a call."""
    axes = [(number, axis) for number, latent in enumerate(call.latents) for axis in range(latent.ndim - 2)]
    tried = smaller(dataclasses.replace(call, whole_axes=frozenset(each for each in axes if each[0])), *SIZES[0])
    stay = set()
    for each in axes:
        size = tried.latents[each[0]].shape[2 + each[1]]
        shorter = smaller(dataclasses.replace(tried, whole_axes=frozenset(axes) - {each}), (size + 1) // 2, SIZES[0][1])
        if each[0] and not (size > 1 and runs(shorter)):
            stay.add(each)
    return dataclasses.replace(call, whole_axes=frozenset(stay))


def entry_of(call: Call, entry: int) -> Call:
    """Return the call of one batch entry, as a rank gets it."""
    rows, tensors = slice(entry, entry + 1), to_tensors(call.named, call.timestep)
    named = from_tensors({name: tensor[rows] for name, tensor in tensors.items()}, structure_of(tensors))
    return dataclasses.replace(call, x=call.x[rows], timestep=call.timestep[rows], named=named)


def words_of(call: Call) -> int:
    """Return the number of text tokens; 0 without text."""
    context = call.named.get("context")
    return context.shape[1] if isinstance(context, torch.Tensor) and context.ndim == 3 else 0


def does_not_run(own: OwnClass, call: Call, error: str) -> ValueError:
    """Return the error for the user if the class fails with `error` in this call."""
    if call.named.get(CONTROL):
        return ValueError(f"control_net: ComfyUI's class {own.name} does not run with this ControlNet ({error}).")
    said = [f"positive, negative: ComfyUI's class {own.name} does not run with this prompt and latent_image ({error})."]
    said += [f"The latent has {call.x.shape[1]} channels: use the Empty Latent node made for this model."]
    text = call.named.get("context")
    if isinstance(text, torch.Tensor) and text.numel():
        said += [f"Its text has width {text.shape[-1]}. Try another text encoder, or another type in CLIPLoader."]
    return ValueError(" ".join(said))


def copied(value: Any) -> Any:
    """`value` with copies of all its containers and tensors."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def one_entry(call: Call) -> Call:
    """The call of the first batch entry in host memory, without ControlNets and without options that ranks do not get."""
    one = entry_of(dataclasses.replace(call, named={**call.named, CONTROL: None}), 0)
    named = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(one.named))
    return dataclasses.replace(one, x=one.x.cpu(), timestep=one.timestep.cpu(), named=named, options={})


def conditioning(call: Call) -> dict[str, torch.Tensor]:
    """Return the conditioning tensors that ranks get for this call of the whole latent."""
    return to_tensors(call.named, call.timestep, () if LATENTS in call.named else call.x.shape[1:])


def smaller(call: Call, side: int | Sequence[int], words: int) -> Call:
    """The call with a smaller latent and at most `words` text tokens, unless it is a `whole_text`. Tensors that belong to
    either are cut in the same way.

    `side`: limit of latent rows, columns and frames. A sequence limits each axis of the first latent, and its maximum limits
    all axes of other latents. If each latent cell has a timestep, timesteps and other values by cell are cut too.
    """
    latents, text, of_cells = call.latents, words_of(call), _has_times_of_cells(call)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        for number, latent in enumerate(latents):
            sizes = tuple(latent.shape[2:])
            if (scale := _scale(tensor, sizes)) is None:
                continue
            for axis, size in enumerate(sizes):
                at = axis - len(sizes)
                if -at > tensor.ndim - 2 or (number, axis) in call.whole_axes:
                    continue  # an image beside a video has no frames
                most = min(size, side if isinstance(side, int) else max(side) if number else side[axis])
                if axis >= len(sizes) - 2:
                    tensor = tensor.narrow(at, 0, math.ceil(scale * most))
                else:  # more frames are those of references, too
                    frames = tensor.shape[at]
                    tensor = tensor.narrow(at, 0, most + frames - size if frames >= size else min(most, frames))
            return tensor
        if tensor.ndim > 1 and tensor.shape[1] == text:
            return tensor if call.whole_text else tensor[:, :words]
        return _of_cells(tensor, latents[0].shape[2:], side) if of_cells else tensor

    others = {name: value for name, value in call.named.items() if name != CONTROL}
    named = {**call.named, **pytree.tree_map_only(torch.Tensor, cut, others)}
    parts = [cut(latent) for latent in latents]
    first, *times = call.times
    times = [_of_frames(each, *both) for each, *both in zip(times, latents[1:], parts[1:], strict=False)]
    times = [_of_cells(first, latents[0].shape[2:], side) if of_cells else first, *times]
    return dataclasses.replace(call, named=named).with_times(times).with_latents(parts)


def _has_times_of_cells(call: Call) -> bool:
    """Whether each latent cell has its own timestep, as in an LTX video with a mask."""
    cells, times = call.latents[0].shape[2:], call.times[0]
    return times.ndim > 1 and times.shape[1] == math.prod(cells) > cells[0]


def _of_frames(times: torch.Tensor, latent: torch.Tensor, smaller_latent: torch.Tensor) -> torch.Tensor:
    """Return timesteps with one for each frame of `latent`, cut to the frames of `smaller_latent`. Other timesteps stay."""
    frames = latent.shape[2]
    return times.narrow(1, 0, smaller_latent.shape[2]) if times.ndim > 1 and times.shape[1] == frames else times


def _of_cells(tensor: torch.Tensor, sizes: Sequence[int], side: int | Sequence[int]) -> torch.Tensor:
    """The tensor cut to a smaller latent, if it has a value for each cell of a latent of `sizes`, or of some of its frames.

    Other tensors stay. `side`: as in `smaller`. A tensor for some frames keeps at least one, and fewer than the smaller
    latent.
    """
    sizes, most = (1, *sizes)[-3:], (side,) * 3 if isinstance(side, int) else (1, *side)[-3:]
    (frames, *cells), (fewer, *fewer_cells) = sizes, map(min, sizes, most)
    for axis in range(1, tensor.ndim):
        own, rest = divmod(tensor.shape[axis], math.prod(cells))
        if not rest and 0 < own <= frames:
            tensor = tensor.unflatten(axis, (own, *cells))
            for at, count in enumerate((fewer if own == frames else min(own, max(1, fewer - 1)), *fewer_cells)):
                tensor = tensor.narrow(axis + at, 0, count)
            return tensor.flatten(axis, axis + 2)
    return tensor


def _scale(tensor: torch.Tensor, sizes: tuple[int, ...]) -> float | None:
    """Return the rows (and columns) of `tensor` for each latent row (and column). None: the tensor does not belong to the
    latent. `sizes`: the latent's. The tensor may have another number of frames, or be a single image for a video."""
    own = tuple(tensor.shape[-len(sizes) :])
    if own == sizes:
        return 1
    if tensor.ndim == 4 and own[-2:] == sizes[-2:]:
        return 1
    if tensor.ndim < len(sizes) + 2:
        return None
    return next((by for by in PIXELS if own[-2:] == tuple(by * size for size in sizes[-2:])), None)


def drawn(call: Call, seed: int, time: float | None = None) -> Call:
    """Return the call with random values in its float tensors. The run's sigmas stay, and the call's sigma is one of them.
    `time`: timestep of all entries. None: random timesteps between 0.1 and 0.9 of the call's largest."""
    g = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.cpu().clone()
        shape = list(tensor.shape)
        if tensor.ndim > 3 and tensor.shape[1] > 1 and bool((tensor == tensor[:, :1]).all()):
            shape[1] = 1  # a mask of all channels stays one
        values = torch.randn(shape, generator=g).expand(tensor.shape)
        # A class may ask for the sign, such as that of places which are no part of the latent.
        return values.clone() if bool((tensor < 0).any()) else values.abs()

    largest = max(float(call.timestep.float().abs().max()), 1e-3)

    def draw_times(tensor: torch.Tensor) -> torch.Tensor:
        times = (0.1 + 0.8 * torch.rand(tensor.shape, generator=g)) * largest
        return (times if time is None else torch.full_like(times, time)).to(tensor.dtype)

    times = draw_times(call.timestep)
    named, options = (pytree.tree_map_only(torch.Tensor, draw, dict(each)) for each in (call.named, call.options))
    if OPTIONS in named:
        named[OPTIONS] = with_tried_blocks(named[OPTIONS], seed)
    for drawn_options, of_call in ((options, call.options), (named.get(OPTIONS, {}), call.named.get(OPTIONS, {}))):
        if set(SIGMAS) <= set(of_call):
            of_run, last = of_call[SIGMAS[1]].cpu(), len(of_call[SIGMAS[1]]) - 2
            place = float(torch.rand((), generator=g)) if time is None else 1 - max(0.0, min(1.0, time / largest))
            of_entries = of_run[round(place * last)].expand_as(of_call[SIGMAS[0]])
            drawn_options.update(zip(SIGMAS, (of_entries, of_run), strict=True))
    return dataclasses.replace(call, x=draw(call.x), timestep=times, named=named, options=options)


def distance(a: Any, b: Any) -> float:
    """Largest absolute difference of two outputs, divided by the largest absolute value of `b`. Infinite for NaN."""
    return float(((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).nan_to_num(math.inf))


def draw_weights(model: nn.Module, seed: int, idle: Sequence[str] = (), share: bool = False) -> None:
    """Fill the model with random float32 weights on the CPU that keep activations near 1. Modules in `idle` get none.

    Weights with rows of the same length are parts of the same noise, see `noise_lengths`. `share`: they share its memory.
    """
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(NOISE, generator=g)
    scaled = {
        row: noise.repeat(math.ceil(most / NOISE)).div_(math.sqrt(row)) for row, most in noise_lengths(model, idle).items()
    }
    for path, name, module, parameter in _drawn(model, idle):
        start = int(torch.randint(NOISE, (), generator=g))
        values = scaled[_row(parameter)][start : start + parameter.numel()].view(parameter.shape)
        if parameter.ndim == 1 and f"{path}.{name}".endswith("weight"):
            values = values + 1
        module._parameters[name] = nn.Parameter(values if share else values.clone(), requires_grad=False)
    for module in model.modules():
        for buffer in stored_tables(module).values():
            buffer.normal_(generator=g)


def noise_lengths(model: nn.Module, idle: Sequence[str] = ()) -> dict[int, int]:
    """Return, by length of a weight's rows, how many values of noise all such weights need. Each begins at a random one of
    the first NOISE."""
    found: dict[int, int] = {}
    for _, _, _, parameter in _drawn(model, idle):
        found[_row(parameter)] = max(found.get(_row(parameter), 0), NOISE + parameter.numel())
    return found


def _drawn(model: nn.Module, idle: Sequence[str]) -> Iterator[tuple[str, str, nn.Module, nn.Parameter]]:
    """Yield (path of its module, name there, module, parameter), but not of modules in `idle`."""
    for path, module in model.named_modules():
        if not any(f"{path}.".startswith(f"{name}.") for name in idle):
            for name, parameter in list(module.named_parameters(recurse=False)):
                yield path, name, module, parameter


def _row(weight: nn.Parameter) -> int:
    """Return how many values a product with the weight adds up. Vectors are as small as if they were 100."""
    return max(1, weight[0].numel()) if weight.ndim > 1 else 100


def stored_tables(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own float buffers that a checkpoint stores, by name."""
    found = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_floating_point()}
    return {name: buffer for name, buffer in found.items() if name not in module._non_persistent_buffers_set}
