"""The blocks of a model: which lists they are in, what surrounds them, and which of them a pipeline stage has."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_backend.core.spans import Span

from .step_inputs import ArgumentCut, Config, StepInputs

JOINT, IMAGE = "joint", "image"
"""Which tokens an attention module mixes. JOINT: text and image. IMAGE: the image alone."""
TEXT, IMAGE_TO_TEXT, TEXT_TO_IMAGE = "text", "image to text", "text to image"
"""TEXT: attention over the text stream alone. The others: queries of the first stream look at keys of the second."""
PAIRED = "paired"
"""Attention of two streams of a video's tokens, whose heads have the channels of one, then those of the other. The second
attends to itself, without frame 0, which it has not; the first to itself and, in every frame, to that frame of the second.
Heads of one stream's width attend as JOINT."""


@dataclass(frozen=True)
class Values:
    """How an attention module makes its values: names of layers in the module, and of arguments that it is called with.

    Each layer's output [B, n, heads x D] is the values of a stream as they are attended to, repeated where several heads
    share them. Ulysses ranks compute them before queries and keys (rank/attention/early_values.py).
    """

    image: str = "to_v"
    """Layer for the image stream, or for all tokens where the module sees them joined."""
    query: str = "to_q"
    """Layer of the same input that the module calls before `image`. Only where there is no `text`."""
    text: str = "add_v_proj"
    """Layer for a text stream of its own. A module without it has none."""
    image_argument: str = "hidden_states"
    text_argument: str = "encoder_hidden_states"
    """Inputs of `image` and `text`, where the module has both."""


@dataclass(frozen=True)
class BlockList:
    """One of the class's lists of blocks: what its blocks are called with, and what they return."""

    name: str
    """Attribute of the diffusers class."""

    returns: tuple[str, ...] = ("text", "image")
    """Streams that a block returns, in its order."""

    image: str = "hidden_states"
    """A block's argument for the image stream."""

    text: str = "encoder_hidden_states"
    """A block's argument for the text stream."""

    joined: bool = False
    """Text and image are one tensor, the image stream, in the order that `Blocks.text_first` says."""

    cuts: Mapping[str, ArgumentCut] = field(default_factory=dict)
    """Other arguments of a block that have a token axis -> how they are cut down to a rank's tokens. Only where
    `Forward.whole_latent`."""

    by_token: Mapping[str, Callable[[Any, StepInputs], Any]] = field(default_factory=dict)
    """Arguments of a block that are made for the picture alone -> what they are for the rank's tokens, which include those
    of reference pictures in their places. (value that the forward has, micro-step) -> value."""

    attention: Mapping[str, str] = field(default_factory=lambda: {"attn": JOINT})
    """Attention module of a block -> the tokens that it mixes, of JOINT to PAIRED."""

    values: Values | None = Values()
    """Of the modules in `attention` that are JOINT or IMAGE. None: they are made together with something else, or changed
    before attention."""

    prologue: bool = False
    """The list belongs to the first stage as a whole (refiners). Its blocks are not counted among the model's."""

    needs_text: bool = False
    """The blocks cannot run without text: where a rank has none they get one token that nothing looks at. Only where
    `Forward.whole_latent`."""

    def skips(self, done: int, count: int) -> int:
        """Long skips. (blocks that have run, blocks of the list) -> how many blocks, from the first on, have an output that
        a later block still wants. Those outputs cross to the next stage with the hidden states."""
        return 0


@dataclass(frozen=True)
class Blocks:
    """A model's blocks and the modules around them. Blocks are numbered through all lists that are no prologue.

    Read by the ranks' stages, by placement and memory on the client, and by ControlNet.
    """

    lists: tuple[BlockList, ...]
    """In the order in which they run."""

    counts: Callable[[Config], dict[str, int]]
    """List -> number of its blocks. Lists of the prologue are left out."""

    epilogue: tuple[str, ...]
    """Modules of the class that only the last stage has."""

    prologue: tuple[str, ...] = ()
    """Modules of the class that only the first stage has. On later stages each gives zeros of the hidden width."""

    text_first: bool = True
    """Order of the joint sequence: [text, image], or else [image, text]."""

    residuals: Mapping[str, str] = field(default_factory=dict)
    """ControlNet: kind of output as ComfyUI names it ("input", "output") -> list behind whose blocks it is added.
    Z-Image's are kinds of patches of its native model; lists of the prologue are among them."""

    native: Mapping[str, str] | None = field(default_factory=dict)
    """Kind of block under which ComfyUI's native model lets other nodes replace its blocks ("double_block",
    "single_block") -> list. None: it does, but blocks of these lists do more than those."""

    native_patches: tuple[str, ...] = ()
    """Patches of other nodes that ComfyUI's native model runs ("attn1_patch"). It takes no notice of others."""

    def total(self, config: Config) -> int:
        """Number of the model's blocks."""
        return sum(self.counts(config).values())

    def owned(self, config: Config, span: Span) -> dict[str, range]:
        """List -> its own blocks among the model's blocks `span`.

        Lists of the prologue belong to the first stage. An empty range says on which side of it the stage is.
        """
        owned, start, counts = {}, 0, self.counts(config)
        for spec in self.lists:
            if spec.prologue:
                owned[spec.name] = range(sys.maxsize) if span.start == 0 else range(sys.maxsize, sys.maxsize)
                continue
            count = counts[spec.name]
            owned[spec.name] = range(*sorted(min(max(edge - start, 0), count) for edge in (span.start, span.stop)))
            start += count
        return owned

    def carried(self, config: Config, boundary: int) -> tuple[str, ...]:
        """Blocks "<list>.<index>" whose outputs cross the boundary before block `boundary`, for long skips."""
        done, counts = self.owned(config, Span(0, boundary)), self.counts(config)
        return tuple(
            f"{name}.{index}"
            for name, skips in ((spec.name, spec.skips) for spec in self.lists if not spec.prologue)
            for index in range(skips(done[name].stop, counts[name]))
        )
