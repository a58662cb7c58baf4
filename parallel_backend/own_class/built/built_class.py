"""Facts about a class and its file, collected when the file is opened."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from parallel_backend.core.own_class import COMPANION, WORDS, OwnAttention, OwnClass, OwnCut, OwnLatent
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.built.counts import Counts, counted, counts_of
from parallel_backend.own_class.calls.call_arguments import LATENTS, structure_of
from parallel_backend.own_class.calls.patching import Companion, Latents, Patching
from parallel_backend.own_class.calls.tried_calls import Call, conditioning, one_entry, smaller, with_whole_axes
from parallel_backend.own_class.cuts.tensor_plan import CutKind, LayerCuts
from parallel_backend.own_class.cuts.token_cut import entries_of

NAME = "ComfyUI's own class"
WHOLE_STATES = 3
"""Number of tensors as large as all hidden states of a call that a rank has at once outside of its blocks: the blocks' input
and output, while the class normalizes and modulates the output."""


def pairs_of(hidden: int) -> float:
    """BuiltClass.attention_share of a usual block of width h. Its linear layers have 12 h^2 weights, so 24 h^2 operations
    for a token. Attention takes 4 h operations for a pair of query and key."""
    return 1 / (6 * hidden)


class StreamKeys(NamedTuple):
    """The tokens whose keys an attention layer stores on a rank."""

    image: bool
    """Whether the image's tokens are among them."""
    streams: tuple[int, ...]
    """Streams whose other tokens are among them."""
    head_size: int


class Counted(NamedTuple):
    """A call's numbers of tokens, from which its memory and time are predicted."""

    grid: tuple[int, ...]
    """Number of the image's tokens along each axis."""
    text: int
    """Number of other tokens, such as text."""
    streams: tuple[tuple[int, int], ...] = ()
    """(stream, number of its tokens in `text`). Empty: unknown."""
    references: int = 0
    """Number of reference images' tokens, which `text` does not include."""


@dataclass(frozen=True)
class BuiltClass:
    """Facts about the class `own` and its tensors."""

    own: OwnClass
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor of the class, by name."""
    parameters: frozenset[str]
    """Names of the class's parameters. Its other tensors are computed if a file lacks them."""
    exact: frozenset[str]
    """Names of parameters and tables that the class keeps in float32 when it is built in another dtype."""
    call: Call | None = None
    """The call with which a trial was made, used as an example. None: no trial ran in this process."""

    @property
    def title(self) -> str:
        """The model's name with its class, for users."""
        return f"{NAME} {self.own.name}"

    @property
    def kind(self) -> str:
        """The class with its arguments. Models of the same kind take equally long."""
        return f"{self.own.name} {self.own.arguments}"

    @cached_property
    def counts(self) -> dict[str, int]:
        """List of blocks -> number of its blocks."""
        return {name: len(blocks) for name, blocks in self.own.lists().items()}

    def place(self, target: str) -> tuple[str, int] | None:
        """Return (list of blocks, number in it) of the block that has the parameter `target`. None: no block has it."""
        parts = target.split(".")
        names = (".".join(parts[:count]) for count in range(2, len(parts)))
        return next((self._places[name] for name in names if name in self._places), None)

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        lists = self.own.lists().items()
        return {f"{name}.{key}": (name, number) for name, blocks in lists for number, key in enumerate(blocks)}

    @cached_property
    def attention(self) -> tuple[tuple[StreamKeys, ...], ...]:
        """For each block, the stored keys of each attention layer whose tokens are cut. Ranks keep no keys of other
        layers."""
        latent = None if self.own.latent is None else set(self.own.latent.streams)

        def keys(call: OwnAttention) -> StreamKeys:
            return StreamKeys(latent is None or bool(latent & set(call.keys)), call.keys, call.head_size)

        return tuple(tuple(keys(call) for call in block.attention if call.keys) for block in self.own.blocks)

    @cached_property
    def hidden(self) -> int:
        """Channels of a token between blocks."""
        widths = [shape[-1] for name, shape in self.shapes.items() if name in self.parameters and len(shape) == 2]
        return max(set(widths), key=widths.count, default=1)

    @cached_property
    def tensor_plan(self) -> LayerCuts:
        """Layers that tensor ranks share, as a trial has shown, and the layers of Adapter.gate, which are cut by heads."""
        plan = {f"{block.name}.{cut.layer}": cut for block in self.own.blocks for cut in block.cuts}
        gates = (f"{block.name}.{adapter_of(self.own.kind).gate}" for block in self.own.blocks if block.cuts)
        rows = {gate: self.shapes[f"{gate}.weight"][0] for gate in gates if f"{gate}.weight" in self.parameters}
        return plan | {gate: OwnCut("", CutKind.COLUMN.value, (size,), (self.own.heads,)) for gate, size in rows.items()}

    @cached_property
    def patching(self) -> Patching:
        """How latents become tokens."""
        latent = self.own.latent
        frames, side, _ = (1, 1, 1) if latent is None else latent.patch
        companion = None
        if latent is not None and latent.companion:
            others = () if self.call is None else self.call.latents[1:]
            axes = len(latent.companion.partition(" -> ")[0].split()) - 1
            # The usual sizes of a second latent are known from a call alone.
            companion = Companion(latent.companion, tuple(others[0].shape[1:]) if others else (1,) * axes)
        return Patching(side=side, frames=frames, video=self.own.video, companion=companion)

    @property
    def options(self) -> tuple[str, ...]:
        """Entries of transformer_options that this pack adds and ranks get."""
        return adapter_of(self.own.kind).options

    def lacks(self, layer: str) -> bool:
        """Whether other nodes look for this layer in ComfyUI's native model, and no block of this file has it."""
        gate = f".{adapter_of(self.own.kind).gate}"
        return gate != "." and layer.endswith(gate) and not any(name.endswith(f"{gate}.weight") for name in self.parameters)

    def is_elsewhere(self, parameter: str) -> bool:
        """Whether only ComfyUI's process computes with this parameter, so that no rank has it."""
        return parameter.startswith(tuple(f"{module}." for module in adapter_of(self.own.kind).here))

    def attention_share(self, block_list: str) -> float:
        """Return the operations of attention for one pair of query and key, divided by those of one token's linear layers,
        in a block of the list. They are counted in the trial's call; without one, those of a usual block are taken."""
        counts = None if self.call is None else counted(self.own, self.call)
        if counts is None:
            return pairs_of(self.hidden)
        tokens = counts.states / self.hidden
        of_list = (
            each for block, each in zip(self.own.blocks, counts.blocks, strict=True) if block.name.startswith(block_list)
        )
        work = next(of_list)
        return work.attention / max(1, work.layers) / tokens

    def example(self, prompt: int) -> dict[str, torch.Tensor]:
        """Example conditioning tensors with batch size 1, from the trial's call. Without a trial: a text of `prompt` tokens
        on the meta device. Random values would advance the global generator, from which a sampler may draw its noise."""
        if self.call is None:
            return {"context": torch.empty(1, prompt, 1, device="meta")}
        return conditioning(one_entry(self.call))

    def timed_calls(self, rows: Sequence[int], columns: int, text: int) -> list[tuple[Call, Counts]]:
        """Return calls to be timed, with their counts: `call` cut to each of `rows` rows of `columns` tokens, and to `text`
        text tokens. Sizes are limited to those of `call`. Empty: there is no call, or it cannot be counted."""
        own, call = self.own, None if self.call is None else one_entry(self.call)
        if call is None or (whole := counted(own, call)) is None:
            return []
        call = with_whole_axes(call, lambda each: counted(own, each) is not None)
        sizes, side = call.latents[0].shape[2:], self.patching.side
        if own.latent is None:
            side = max(1, round(math.sqrt(math.prod(sizes) * self.hidden / whole.states)))
        frames = (self.patching.frames,) if own.video else ()
        most = min(max(rows), math.ceil(sizes[-2] / side))
        cut = [smaller(call, (*frames, side * max(1, most * count // max(rows)), side * columns), text) for count in rows]
        found = [(each, counts) for each in cut if (counts := counted(own, each)) is not None]
        return found if len(found) == len(cut) else []

    def noise(self, shape: tuple[int, ...]) -> Latents:
        """Random latents of a model call; the first has this shape. Nested latents without proven bands are one packed
        tensor, as in ComfyUI's calls."""
        if self.call is not None and LATENTS in self.call.named and self.patching.companion is None:
            return (torch.randn(shape[0], *self.call.x.shape[1:]),)
        return tuple(map(torch.randn, self.patching.usual(shape)))

    def words(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Return the number of text tokens that run through the blocks, see OwnLatent.words."""
        context = tensors.get("context") if self.own.joint else None
        return context.shape[1] if context is not None and context.ndim == 3 else 0

    def text_tokens(self, companion_tokens: int, tensors: Mapping[str, torch.Tensor]) -> int:
        """Return the number of a call's tokens that are not the image's. All run with the first band."""
        return companion_tokens + self.words(tensors)

    def counted(self, grid: tuple[int, ...], text: int, tensors: Mapping[str, torch.Tensor]) -> Counted:
        """Return the numbers of a call's tokens, including tokens that the class adds. `text`: see text_tokens. Without
        proven bands, all tokens count along the grid's first axis."""
        counts = counts_of(self.own, tensors)
        if counts is None:
            return Counted(grid, text)
        latent = self.own.latent
        if latent is None:
            tokens = math.ceil(counts.states / self.hidden)
            return Counted((tokens, *(1,) * (len(grid) - 1)), 0)
        streams = {
            stream: tokens - (math.prod(grid) if stream in latent.streams else 0)
            for stream, tokens in counts.streams.items()
        }
        references = streams.get(latent.stream, 0) - self._beside_references(latent, tensors) if latent.layout else 0
        if latent.layout:
            streams[latent.stream] = streams.get(latent.stream, 0) - references
        at_once = (
            sum(streams[stream] for stream in entered if stream in streams) for entered in entries_of(self.own.blocks)
        )
        return Counted(grid, max(at_once, default=0), tuple(streams.items()), references)

    def _beside_references(self, latent: OwnLatent, tensors: Mapping[str, torch.Tensor]) -> int:
        """Return the number of text tokens and of a second latent's tokens in the latent's stream."""
        words = self.words(tensors) if WORDS in latent.layout else 0
        if COMPANION not in latent.layout:
            return words
        shapes = [(1, *shape) for shape in structure_of(tensors)[LATENTS]]
        return words + self.patching.companion_tokens(shapes)

    def token_order(self, grid: tuple[int, ...], references: int = 0, along: str = "rows") -> TokenOrder:
        """Return the order of a call's image tokens, for bands along the axis `along`."""
        return TokenOrder(math.prod(grid), self.patching.cut(along).row_tokens(grid), references, along)


@functools.lru_cache(maxsize=8)
def built_class(own: OwnClass) -> BuiltClass:
    """Return facts about a class. Imports it and builds it without memory for weights."""
    model = build(own, torch.bfloat16)
    tensors = model.state_dict()
    return BuiltClass(
        own,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        frozenset(name for name, _ in model.named_parameters()),
        frozenset(name for name, each in tensors.items() if each.dtype == torch.float32),
    )
