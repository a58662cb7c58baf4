"""A model's class as data: what a rank imports and builds, and what a trial has shown about it. The nodes fill it in for
ComfyUI's classes. A rank only imports modules of PACKAGES, whatever its message names."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

ROOT = "comfy.ldm."
"""Prefix of the names of ComfyUI's modules that have classes."""
MANY = 1 << 6
"""Number of heads if none is known: as many as a degree may have."""
HEAD_SIZE = 64
"""Head size for which attention kernels are tried if no trial has shown any head."""
WORDS, REFERENCES, COMPANION, LATENT = "words", "references", "companion", "latent"
"""Kinds of tokens in OwnLatent.layout."""
DTYPE = "torch dtype "
"""Prefix of a constructor argument that is a torch dtype; its name follows."""


def name_pattern(name: str) -> str:
    """Return the regular expression for the modules that a record calls `name`. A star at the beginning stands for a block
    ("<list>.<index>"), a star elsewhere for an index."""
    star = r"[^.]+\.[^.]+" if name.startswith("*") else r"[^.]+"
    return re.escape(name).replace(r"\*", star)


Conversion = tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...]
"""(tensor in ComfyUI's layout, its rows in order as (tensor of the file, first row, row after the last)), for a file in
diffusers' layout. Empty: the file is in ComfyUI's layout."""


@dataclass(frozen=True)
class Package:
    """Modules whose classes a rank builds, and how ranks reach those classes' attention."""

    root: str
    """Prefix of the modules' names."""
    attention: str
    """The module with the attention functions. Other modules import them under names of their own."""
    functions: str
    """Prefix of the functions' names. They have ComfyUI's signature."""
    around: tuple[str, ...] = ()
    """Prefixes of modules that may be imported before the class's module, or in which values may be set."""


PACKAGES = (
    Package(ROOT, f"{ROOT}modules.attention", "attention_", around=("comfy.",)),
    Package("parallel_backend.quickstart.", "parallel_backend.quickstart.attention", "attention"),
)
"""Ranks build classes only from these packages: no message makes them import anything else."""
ROOTS = tuple(package.root for package in PACKAGES)
"""Prefixes of the names of their modules."""


@dataclass(frozen=True)
class OwnSlice:
    """A tensor among a block's arguments that is split by tokens over the sequence ranks."""

    tensor: int
    """The tensor's number among the tensors of the block's call, positional tensors first."""
    axis: int
    """The tensor's axis of tokens."""
    streams: tuple[int, ...]
    """Numbers of the streams whose tokens it has, one after the other. A stream is a sequence of tokens, such as the image
    or text."""
    enters: bool
    """Whether it is the stream itself. It is cut in the first block that gets it, and has only the rank's tokens from there
    on."""
    axes: int = 1
    """Number of axes of tokens, from `axis` on, such as frames, rows and columns. A rank's tokens then have one frame and
    one row."""


@dataclass(frozen=True)
class OwnAttention:
    """One attention call in a block: the tokens of its queries and keys, and its heads."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    """Numbers of the streams whose tokens the keys are, in order, as `queries` has them. Empty: every rank has all keys, and
    nothing is exchanged."""
    heads: int
    """Number of query heads. Keys that several heads share are repeated."""
    head_size: int
    sharing: int = 1
    """Number of neighbouring heads that have the same keys and values."""


@dataclass(frozen=True)
class OwnCut:
    """A layer of a block that tensor ranks share."""

    layer: str
    """The layer's name in the block."""
    kind: str
    """Value of cuts.tensor_plan.CutKind."""
    sizes: tuple[int, ...]
    """Features of each part of the cut side, in order. Every rank has a share of every part."""
    units: tuple[int, ...] = ()
    """For each part, the number of equal units. A part is cut between units, as evenly as possible. Empty: every feature is
    a unit."""


@dataclass(frozen=True)
class OwnBlock:
    """A block of the class. Blocks are in the order in which a call runs them."""

    name: str
    """The block's name in the model, such as "double_layers.0"."""
    returns: tuple[str, ...]
    """For each returned value, the place of the argument with the same shape and dtype: its name or its position; "0/1" is
    item 1 of argument 0. Empty: the value is None."""
    alone: bool
    """Whether the block returns one tensor instead of a tuple."""
    slices: tuple[OwnSlice, ...] = ()
    """Arguments that are split by tokens over sequence ranks. Those that enter come first."""
    attention: tuple[OwnAttention, ...] = ()
    """The block's attention calls in order, if tokens are cut."""
    leaving: tuple[tuple[int, ...], ...] = ()
    """For each returned value, the streams whose tokens it has, if all ranks' tokens are gathered after this block: the last
    block, and the last of a list such as refiners, after which all tokens enter again as other streams."""
    placed: tuple[tuple[int, ...], ...] = ()
    """Like `leaving`, if the class needs all tokens between this block and the next one, for example to add or remove some.
    A rank's own tokens then are at their positions among all tokens, and others are NaN."""
    cuts: tuple[OwnCut, ...] = ()
    """Layers that tensor ranks share. Empty: no trial was made for them."""
    divided: tuple[tuple[str, str], ...] = ()
    """(module in the block, its attribute): integers, such as head counts, that are divided over the tensor ranks."""
    headed: tuple[tuple[int, int], ...] = ()
    """(number of a tensor as in OwnSlice, its axis of heads): arguments that are cut by heads over the tensor ranks."""
    units: tuple[int, ...] = ()
    """For each of `divided`, the units as in OwnCut.units; 0: each one is a unit. Empty: all are 0."""
    head_units: int = 0
    """Number of equal units of the block's heads, if tensor ranks cannot share the heads evenly. Ranks have whole units,
    because heads of a unit may share keys. 0: heads are shared evenly."""
    until: str = ""
    """The last block of its list that reads this block's output, such as by a long skip, if that is not the next one. All
    stages up to that block get the output. Empty: only the next block reads it."""
    local: tuple[int, ...] = ()
    """Streams that leave the last block with only a rank's own tokens, because the class counts their tokens by the blocks'
    inputs."""


@dataclass(frozen=True)
class OwnLatent:
    """Where the latent's tokens are among the streams, for bands (PipeFusion)."""

    stream: int
    """The stream in which the latent's tokens enter, in raster order."""
    before: bool
    """Whether other tokens of that stream come before the latent's, not counting references. False: after them, or there are
    none."""
    patch: tuple[int, int, int]
    """Latent frames, rows and columns of a token."""
    words: bool
    """Whether blocks have other tokens than those of latents and references. They run with the first band."""
    pads: bool
    """Whether the class pads a latent circularly to whole tokens, as the client does for bands."""
    again: tuple["OwnEntry", ...] = ()
    """Where the latent's tokens enter again, each time that they were gathered after a list of blocks. Also streams with one
    token for each of the latent's, such as hints."""
    companion: str = ""
    """einops pattern from a second latent to its tokens (Companion.pattern), which run with the first band. Empty: there is
    one latent."""
    layout: tuple[str, ...] = ()
    """The kinds of tokens in `stream`, in order, if bands split the tokens of references. Each kind occurs once, but
    references may be on both sides of the latent's tokens. Empty: there are no references, or they run with the first
    band."""
    ahead: str = ""
    """Argument with the references before the latent, whose tokens have the size `patch`, if there are also some after the
    latent."""
    beside: bool = False
    """Whether references are beside an image: each row of the latent's tokens is followed by equally many of theirs. In
    `layout` they are after the latent's."""
    shared: tuple[str, ...] = ()
    """Modules whose output all bands of a call share, see name_pattern."""
    idle: tuple[str, ...] = ()
    """Modules of blocks that only text passes, named in the same way. Bands without text skip them."""
    steady: bool = False
    """Whether text tokens (and references counted as such) and their keys are equal in all calls: ranks compute them once in
    a run."""

    @property
    def streams(self) -> tuple[int, ...]:
        """All streams in which the latent's tokens enter."""
        return self.stream, *(entry.stream for entry in self.again)

    def tokens_ahead(self, arguments: Mapping[str, Any]) -> int:
        """Return the number of reference tokens before the latent, if there are others after it; otherwise 0."""
        sizes = arguments[self.ahead].shape[-3:] if self.ahead else (0,)
        return math.prod(math.ceil(size / by) for size, by in zip(sizes, self.patch, strict=bool(self.ahead)))

    def why_uneven(self, sizes: tuple[int, ...]) -> str:
        """Why a latent of these frames, rows and columns cannot be padded circularly. Empty: it can, or need not be."""
        even = all(size % by == 0 for size, by in zip(sizes, self.patch[-len(sizes) :], strict=True))
        pads = self.pads and not self.companion
        return "" if even or pads else "the latent's height or width is not a multiple of the model's patch size"


@dataclass(frozen=True)
class OwnEntry:
    """A point at which the latent's tokens enter again."""

    stream: int
    before: bool
    """Whether other tokens come before the latent's. False: all others come after them."""
    behind: bool
    """Whether, in addition to those before, equally many tokens come after them as in the first stream."""


@dataclass(frozen=True)
class OwnClass:
    """A class, its arguments, and the settings of the process that imports it."""

    kind: str
    """Name of the class in ComfyUI's supported_models. Empty: it is not one of ComfyUI's."""
    folder: str
    """The folder from which its package is imported if it is not installed. Empty: it is installed."""
    module: str
    name: str
    arguments: str
    """Arguments of the constructor, as JSON."""
    settings: tuple[tuple[str, str, bool], ...]
    """(module, attribute, value): set in this order before the class's module is imported."""
    imports: tuple[str, ...]
    """Modules to import before it, because its code uses them without importing them."""
    keys: tuple[tuple[str, str], ...]
    """(parameter of the class, key in the file), if they differ."""
    halves: tuple[str, ...]
    """Compute dtypes in core.dtypes.HALVES, the best first, as in ComfyUI's supported_inference_dtypes."""
    video: bool
    """Whether latents have a time axis."""
    unet: bool = False
    """Whether it is a UNet, whose blocks are not a list of similar blocks. Only split batch can run it on several ranks."""
    blocks: tuple[OwnBlock, ...] = ()
    """The blocks in the order of a call. Empty: a UNet, or no trial was made."""
    latent: OwnLatent | None = None
    """None: bands of the latent are not proven."""
    conversion: Conversion = ()
    """The conversion by which ComfyUI gives the file's tensors the names of its layout."""

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Computed once, because models on ranks are looked up by it at every call."""
        return self._hash

    def __post_init__(self):
        around = {*(module for module, _, _ in self.settings), *self.imports}
        for package in PACKAGES:
            if self.module.startswith(package.root) and all(f"{each}.".startswith(package.around) for each in around):
                return
        raise ValueError(f"ranks do not build the class of {self.module}, or do not import {sorted(around)} for it")

    @property
    def heads(self) -> int:
        """Fewest heads of an attention call whose tokens sequence ranks share. MANY if no trial has shown any."""
        return min((call.heads for call in self._shared_calls), default=MANY)

    @property
    def head_units(self) -> int:
        """OwnBlock.head_units of a block with `heads` heads."""
        calls = ((block, call) for block in self.blocks for call in block.attention if call.keys)
        return next((block.head_units for block, call in calls if call.heads == self.heads), 0)

    @property
    def head_size(self) -> int:
        """Channels of each of `heads` in the widest of these calls. HEAD_SIZE if there are none."""
        widths = [call.heads * call.head_size for call in self._shared_calls]
        return math.ceil(max(widths) / self.heads) if widths else HEAD_SIZE

    @property
    def sharing(self) -> int:
        """OwnAttention.sharing of all these calls; 1 if they differ."""
        sharing, *others = {call.sharing for call in self._shared_calls} or {1}
        return 1 if others else sharing

    @property
    def steady(self) -> bool:
        """OwnLatent.steady; False without proven bands."""
        return self.latent is not None and self.latent.steady

    @property
    def joint(self) -> bool:
        """Whether other tokens than the latent's run through the blocks, as far as a trial has shown."""
        if self.latent is not None:
            return self.latent.words
        return any(sum(map(bool, block.returns)) > 1 for block in self.blocks)

    @property
    def _shared_calls(self) -> list[OwnAttention]:
        return [call for block in self.blocks for call in block.attention if call.keys]

    def lists(self) -> dict[str, list[str]]:
        """Return list of blocks -> names of the blocks in it, in the order in which they run."""
        found: dict[str, list[str]] = {}
        for block in self.blocks:
            name, _, key = block.name.rpartition(".")
            found.setdefault(name, []).append(key)
        return found
