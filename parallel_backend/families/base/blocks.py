"""The blocks of a model: their lists, the modules around them, and which blocks a pipeline stage has."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from parallel_backend.core.spans import Span

from .step_inputs import ArgumentCut, Config

JOINT = "joint"
"""Which tokens an attention module mixes: those of text and image, or of the image if no text runs through the blocks."""
CAUSAL_TEXT = "causal text"
"""As JOINT for the image's tokens. A text token sees no image, and of the text the first TEXT_ENDS tokens. The text is the
first of the joint sequence."""
WINDOWS = "windows"
"""Windows of the video (`Blocks.windows`), each with all of the text: a token of the video sees its window and the text. A
token of the text attends in every window, and its output is the mean over the windows."""
PAIRED = "paired"
"""Attention of two streams of a video's tokens, whose channels lie side by side in each head. The second stream attends to
itself except its frame 0, which is empty. The first stream attends to itself and, in every frame, to the same frame of the
second. Heads of one stream's width attend as JOINT."""


QUERIES, VALUES, TEXT_VALUES = "to_q", "to_v", "add_v_proj"
"""Layers of an attention module. TEXT_VALUES: of a text stream of its own. A module without it gets all tokens as one
stream, and calls QUERIES, with the same input, before VALUES."""


class StreamKeys(NamedTuple):
    """In place of JOINT ... PAIRED: the keys of an attention layer of a class whose streams a trial has numbered."""

    image: bool
    """The image's tokens are among them."""
    streams: tuple[int, ...]
    """Streams whose other tokens are."""
    head_size: int


Over = str | StreamKeys
"""The tokens that an attention layer is over."""
Windows = tuple[tuple[Span, ...], ...]
"""A cut of a video into windows: for each axis the spans of its tokens. Every product of spans is a window."""


@dataclass(frozen=True)
class BlockList:
    """One of the class's lists of blocks: the arguments of its blocks, and what they return."""

    name: str
    """Attribute of the diffusers class."""

    returns: tuple[str, ...] = ("text", "image")
    """Streams that a block returns, in its order."""

    joined: bool = False
    """Text and image are one tensor, in the order of `Blocks.text_first`."""

    cuts: Mapping[str, ArgumentCut] = field(default_factory=dict)
    """Other arguments of a block that have a token axis -> cut to the rank's tokens. Only with `Forward.whole_latent`."""

    attention: Mapping[str, str] = field(default_factory=lambda: {"attn": JOINT})
    """Attention module of a block -> the tokens that it mixes: one of JOINT ... PAIRED."""

    values_first: bool = True
    """VALUES and TEXT_VALUES of the modules in `attention` that are JOINT give the values that attention reads,
    with nothing applied in between: [B, n, heads x D]. Ulysses ranks compute values before queries and keys, so that their
    exchange overlaps (rank/attention/early_values.py)."""


@dataclass(frozen=True)
class Blocks:
    """A model's blocks and the modules around them. Blocks are numbered consecutively through all lists.

    Used by the ranks' stages, by placement and memory on the client, and by ControlNet.
    """

    adds_residuals: ClassVar[bool] = False
    """The class itself adds a control's residuals. Every rank then gets all of them, under the control's own names."""

    lists: tuple[BlockList, ...]
    """In the order in which they run."""

    counts: Callable[[Config], dict[str, int]]
    """Constructor arguments -> {list: number of its blocks}."""

    epilogue: tuple[str, ...]
    """Modules outside the lists that only the last stage has."""

    prologue: tuple[str, ...] = ()
    """Modules outside the lists that only the first stage has. On later stages, stand-ins give zeros of the hidden width."""

    text_first: bool = True
    """Order of the joint sequence: [text, image], or else [image, text]."""

    windows: Callable[[tuple[int, ...]], tuple[Windows, ...]] | None = None
    """Tokens of the video by axis -> the ways to cut it into windows, in layers over WINDOWS. Block i of a list has the way
    i modulo their number."""

    controlled: bool = False
    """There are controls that add to all tokens of the native model's joint sequence, [text, image] (Fun control of VACE's
    kind). Residuals are then of all tokens, see client.call.Residuals."""

    native: Mapping[str, str] | None = field(default_factory=dict)
    """Kind of block by which other nodes replace blocks of ComfyUI's native model ("double_block", "single_block") -> list.
    None: the native model allows it, but the blocks of these lists do more than the native blocks."""

    native_patches: tuple[str, ...] = ()
    """Patches of other nodes that ComfyUI's native model runs ("attn1_patch"). It ignores others."""

    whole_states: int = 0
    """Hidden states of all of a call's tokens that a rank has at once outside of blocks in which it computes a part of them.
    0: it has no other tokens than its part."""

    @property
    def joint(self) -> bool:
        """Text tokens run through the blocks with the image's."""
        return any(spec.joined or "text" in spec.returns for spec in self.lists)

    def attention(self, targets: Iterable[str]) -> tuple[tuple[Over, ...], ...]:
        """For each block, the tokens that each of its attention layers is over.

        `targets`: names of the model's parameters.
        """
        parts = [target.split(".") for target in targets]
        modules = {".".join(names[:count]) for names in parts for count in range(2, len(names))}
        # Keys of WINDOWS are those of JOINT; PAIRED keeps the keys of two streams.
        kept = {WINDOWS: (JOINT,), PAIRED: (JOINT, JOINT)}

        def layers(name: str, over: Mapping[str, str]) -> tuple[str, ...]:
            kinds = [tokens for layer, tokens in over.items() if f"{name}.{layer}" in modules]
            return tuple(tokens for kind in kinds for tokens in kept.get(kind, (kind,)))

        by_block: list[tuple[str, ...]] = []
        for spec in self.lists:
            indices = sorted({int(names[1]) for names in parts if names[0] == spec.name})
            by_block += [layers(f"{spec.name}.{index}", spec.attention) for index in indices]
        return tuple(by_block)

    def total(self, config: Config) -> int:
        """Number of the model's blocks."""
        return sum(self.counts(config).values())

    def names(self, config: Config) -> list[str]:
        """The blocks' names in the model, "<list>.<index>", in their order."""
        return [f"{name}.{index}" for name, count in self.counts(config).items() for index in range(count)]

    def place(self, target: str) -> tuple[str, int] | None:
        """(list, index) of the numbered block that a parameter is in. None: it is in none."""
        name, _, rest = target.partition(".")
        return (name, int(rest.partition(".")[0])) if any(name == spec.name for spec in self.lists) else None

    def owned(self, config: Config, span: Span) -> dict[str, range]:
        """List -> range of its blocks, by their indices in the list, that are among the model's blocks `span`.

        The bounds of an empty range are 0 if the stage is before the list's blocks and the number of its blocks if after.
        """
        owned, start, counts = {}, 0, self.counts(config)
        for spec in self.lists:
            count = counts[spec.name]
            owned[spec.name] = range(*sorted(min(max(edge - start, 0), count) for edge in (span.start, span.stop)))
            start += count
        return owned
