"""A class of a model as data: what a rank imports and builds, and what a trial has shown of it.

The nodes fill it in for ComfyUI's classes. A rank imports the module that its message names, only from one of PACKAGES.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

ROOT = "comfy.ldm."
"""Beginning of the names of ComfyUI's modules that have classes."""
MANY = 1 << 6
"""As many heads as a degree may be."""
HEAD_SIZE = 64
"""Head size for which attention kernels are tried if no trial has shown any head."""
WORDS, REFERENCES, COMPANION, LATENT = "words", "references", "companion", "latent"
"""Kinds of tokens in OwnLatent.layout."""
DTYPE = "torch dtype "
"""Beginning of an argument that is a dtype of torch, before its name."""


def name_pattern(name: str) -> str:
    """Regular expression for the modules that a record calls `name`. A star stands for a block ("<list>.<index>") at the
    beginning of the name, for an index elsewhere."""
    star = r"[^.]+\.[^.]+" if name.startswith("*") else r"[^.]+"
    return re.escape(name).replace(r"\*", star)


Conversion = tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...]
"""(tensor in ComfyUI's layout, its rows in order as (tensor of the file, first row, row after the last)) of a file in
diffusers' layout. Empty: the file is in ComfyUI's layout."""


@dataclass(frozen=True)
class Package:
    """Modules whose classes a rank builds, and how ranks reach those classes' attention."""

    root: str
    """Beginning of the modules' names."""
    attention: str
    """The module of the attention functions. Other modules import them by names of their own."""
    functions: str
    """Beginning of their names. They have ComfyUI's signature."""
    around: tuple[str, ...] = ()
    """Beginnings of the names of modules that are imported before the class's, or in which values are set."""


PACKAGES = (
    Package(ROOT, f"{ROOT}modules.attention", "attention_", around=("comfy.",)),
    Package("parallel_backend.quickstart.", "parallel_backend.quickstart.attention", "attention"),
)
"""Ranks build classes only from these packages: no message makes them import anything else."""
ROOTS = tuple(package.root for package in PACKAGES)
"""Beginnings of the names of their modules."""


@dataclass(frozen=True)
class OwnSlice:
    """A tensor among a block's arguments that is cut by tokens over the sequence ranks."""

    tensor: int
    """The tensor's number among the tensors of the block's call, positional tensors first."""
    axis: int
    """The tensor's axis of tokens."""
    streams: tuple[int, ...]
    """Numbers of the streams whose tokens it has, one behind the other."""
    enters: bool
    """It is the stream itself: cut in the first block that gets it, and local from there on."""
    axes: int = 1
    """Axes of tokens, from `axis` on. Of frames, rows and columns: a part of the tokens then has one frame and one row."""


@dataclass(frozen=True)
class OwnAttention:
    """One call of attention in a block: the tokens of its queries and keys, and its heads."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    """Numbers of the streams whose tokens they are, in order. Empty `keys`: every rank has all of them, and
    nothing is exchanged."""
    heads: int
    """Number of query heads. Keys that several heads share are repeated."""
    head_size: int
    sharing: int = 1
    """Heads in a row that have the same keys and values."""


@dataclass(frozen=True)
class OwnCut:
    """A layer of a block that tensor ranks share."""

    layer: str
    """The layer's name in the block."""
    kind: str
    """Value of base.tensor_plan.CutKind."""
    sizes: tuple[int, ...]
    """Features of each part of the cut side, in order. Every rank has a share of every part."""
    units: tuple[int, ...] = ()
    """For each part, the number of equal units. A part is cut between units, as evenly as possible. Empty: each feature is
    one."""


@dataclass(frozen=True)
class OwnBlock:
    """A block of the class, in the order in which a call runs them."""

    name: str
    """Its name in the model: "double_layers.0"."""
    returns: tuple[str, ...]
    """For each value that it returns, the argument of the same shape and dtype: its name, or its position in digits; of one
    of several in an argument "0/1". Empty: the value is None."""
    alone: bool
    """The block returns one tensor, and no tuple."""
    slices: tuple[OwnSlice, ...] = ()
    """Where tokens are cut over sequence ranks. Those that enter come first."""
    attention: tuple[OwnAttention, ...] = ()
    """The block's calls of attention in order, if tokens are cut."""
    leaving: tuple[tuple[int, ...], ...] = ()
    """For each returned value, the streams whose tokens it has, where cut tokens leave the blocks: behind the last one, and
    behind lists such as refiners, after which all tokens enter again as other streams."""
    placed: tuple[tuple[int, ...], ...] = ()
    """As `leaving`, if the class counts on all tokens between this block and the next one, where it may add to them or cut
    some off. A rank's own then stand at their places there, and others are NaN."""
    cuts: tuple[OwnCut, ...] = ()
    """Layers that tensor ranks share. Empty: no trial has been made for them."""
    divided: tuple[tuple[str, str], ...] = ()
    """(module in the block, its attribute): whole numbers, such as heads, that are divided over the tensor ranks."""
    headed: tuple[tuple[int, int], ...] = ()
    """(number of a tensor as in OwnSlice, its axis of heads): arguments that are cut by heads over the tensor ranks."""
    units: tuple[int, ...] = ()
    """For each of `divided`, as OwnCut.units; 0: each one is a unit. Empty: all are 0."""
    head_units: int = 0
    """Equal units of the block's heads that tensor ranks have whole, since heads may share keys, if they cannot share the
    heads evenly. 0: they can."""
    until: str = ""
    """The last block of its list that reads what this one returns, such as by a long skip, if it is not the next one. Stages
    up to that block's get it. Empty: none does."""
    local: tuple[int, ...] = ()
    """Streams of which a rank's own part leaves the last block: the class counts their tokens by what it got between its
    blocks."""


@dataclass(frozen=True)
class OwnLatent:
    """Where the latent's tokens are among the streams, for bands (PipeFusion)."""

    stream: int
    """The stream that they enter in, in raster order."""
    before: bool
    """Other tokens of that stream than references come before them. False: behind them, or there are none."""
    patch: tuple[int, int, int]
    """Latent frames, rows and columns of a token."""
    words: bool
    """Blocks have other tokens than the latents' and references. They run with the first band."""
    pads: bool
    """The class fills up a latent of other sizes than whole tokens in a circle, as the client does for bands."""
    again: tuple["OwnEntry", ...] = ()
    """Where they enter again, each time that they have left a list of blocks. Also streams with one token for each of
    theirs, such as hints."""
    companion: str = ""
    """einops pattern from a second latent to its tokens (Companion.pattern), which run with the first band. Empty: there is
    one latent."""
    layout: tuple[str, ...] = ()
    """The kinds of tokens in `stream`, each once and in order, if there are tokens of references, which bands share out.
    Those of references may be on both sides of the latent's. Empty: there are none, or they run with the first band."""
    ahead: str = ""
    """Argument that has the references before the latent, each in tokens of `patch`, if there are others behind it."""
    beside: bool = False
    """References stand beside an image: behind each row of the latent's tokens come as many of theirs, and `layout` has
    them behind the latent's."""
    shared: tuple[str, ...] = ()
    """Modules whose output all bands of a call share, see name_pattern."""
    idle: tuple[str, ...] = ()
    """Linear layers of blocks that words alone pass, named in the same way."""
    steady: bool = False
    """Words, references among them, and their keys are the same in all calls: ranks run them once in a run."""

    @property
    def streams(self) -> tuple[int, ...]:
        """All streams that they enter in."""
        return self.stream, *(entry.stream for entry in self.again)

    def tokens_ahead(self, arguments: Mapping[str, Any]) -> int:
        """Tokens of the references before the latent, if there are others behind it. 0: there are not."""
        sizes = arguments[self.ahead].shape[-3:] if self.ahead else (0,)
        return math.prod(math.ceil(size / by) for size, by in zip(sizes, self.patch, strict=bool(self.ahead)))

    def why_uneven(self, sizes: tuple[int, ...]) -> str:
        """Why a latent of these frames, rows and columns cannot be filled up in a circle. Empty: it can, or need not be."""
        even = all(size % by == 0 for size, by in zip(sizes, self.patch[-len(sizes) :], strict=True))
        pads = self.pads and not self.companion
        return "" if even or pads else "the latent's height or width is not a multiple of the model's patch size"


@dataclass(frozen=True)
class OwnEntry:
    """A place at which the latent's tokens enter again."""

    stream: int
    before: bool
    """Other tokens come before them. False: all others come after them."""
    behind: bool
    """Beside those before, as many come behind them as in the first stream."""


@dataclass(frozen=True)
class OwnClass:
    """A class, its arguments, and the settings of the process that imports it."""

    kind: str
    """Name of the class of ComfyUI's supported_models. Empty: it is none of ComfyUI's."""
    folder: str
    """The folder that has its package, which is imported from there if it is not installed. Empty: it is."""
    module: str
    name: str
    arguments: str
    """Arguments of the constructor, as JSON."""
    settings: tuple[tuple[str, str, bool], ...]
    """(module, attribute, value): set in this order before the class's module is imported."""
    imports: tuple[str, ...]
    """Modules that are then imported before it, since its code names them and leaves it to others to import them."""
    keys: tuple[tuple[str, str], ...]
    """(parameter of the class, key in the file), if they differ."""
    halves: tuple[str, ...]
    """Compute dtypes among core.dtypes.HALVES, the best first, as in ComfyUI's supported_inference_dtypes."""
    video: bool
    """Latents have a time axis."""
    unet: bool = False
    """A UNet: its blocks are not a list of similar blocks. Only split batch can run it on several ranks."""
    blocks: tuple[OwnBlock, ...] = ()
    """Empty: no trial has been made, or a UNet."""
    latent: OwnLatent | None = None
    """None: bands of the latent are not proven."""
    conversion: Conversion = ()
    """The conversion by which ComfyUI gives the file's tensors the names of its layout."""

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Worked out once: models on ranks are found by it at every call."""
        return self._hash

    def __post_init__(self):
        around = {*(module for module, _, _ in self.settings), *self.imports}
        for package in PACKAGES:
            if self.module.startswith(package.root) and all(f"{each}.".startswith(package.around) for each in around):
                return
        raise ValueError(f"ranks do not build the class of {self.module}, or do not import {sorted(around)} for it")

    @property
    def heads(self) -> int:
        """Fewest heads of a call of attention that sequence ranks share out. MANY where no trial has shown any."""
        return min((call.heads for call in self._shared_calls), default=MANY)

    @property
    def head_units(self) -> int:
        """See OwnBlock, of one with `heads`."""
        calls = ((block, call) for block in self.blocks for call in block.attention if call.keys)
        return next((block.head_units for block, call in calls if call.heads == self.heads), 0)

    @property
    def head_size(self) -> int:
        """Channels of each of `heads` in the widest of these calls. HEAD_SIZE if there are none."""
        widths = [call.heads * call.head_size for call in self._shared_calls]
        return math.ceil(max(widths) / self.heads) if widths else HEAD_SIZE

    @property
    def sharing(self) -> int:
        """See OwnAttention, of all of these calls. 1, too, if they are not alike."""
        sharing, *others = {call.sharing for call in self._shared_calls} or {1}
        return 1 if others else sharing

    @property
    def steady(self) -> bool:
        """See OwnLatent."""
        return self.latent is not None and self.latent.steady

    @property
    def joint(self) -> bool:
        """Other tokens than the latent's run through the blocks, as far as a trial has shown."""
        if self.latent is not None:
            return self.latent.words
        return any(sum(map(bool, block.returns)) > 1 for block in self.blocks)

    @property
    def _shared_calls(self) -> list[OwnAttention]:
        return [call for block in self.blocks for call in block.attention if call.keys]

    def lists(self) -> dict[str, list[str]]:
        """List of blocks -> the blocks' names in it, in the order in which they run."""
        found: dict[str, list[str]] = {}
        for block in self.blocks:
            name, _, key = block.name.rpartition(".")
            found.setdefault(name, []).append(key)
        return found
