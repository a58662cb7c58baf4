"""What a family is to the backend: data, and a few functions of a line or two."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..layout import Span
from ..stream import Stream
from ..tensor_parallel import Plan
from .patching import Patching

Config = dict[str, Any]
"""Constructor arguments of the family's diffusers class."""

Shapes = Mapping[str, tuple[int, ...]]
"""Checkpoint key (original layout, no prefix) -> shape."""

TEXT_MASK = "text_mask"
"""Name of a conditioning tensor [B, T] bool that any family may have: which text tokens attention may see. It never
reaches the model's own code, which knows one rank's tokens only; the seam applies it (attention.py)."""

GUIDANCE = "guidance"
"""Name of a conditioning tensor [B] that any family may have: embedded guidance, which ranks keep in float32."""

REFERENCES, REFERENCE_POSITIONS = "references", "reference_positions"
"""Names of conditioning tensors that any family may have: tokens [B, R, C] of reference pictures, packed like the latent's,
and their positions [B, R, 3]: index, row, column."""

JOINT, IMAGE, LINEAR, NEIGHBOURS = "joint", "image", "linear", "neighbours"
"""Which tokens a module is over: attention over the whole sequence, or the image's alone; linear attention over the image;
3 x 3 convolutions, over the neighbours in the image (linear_attention.py)."""


@dataclass(frozen=True)
class Source:
    """Where a parameter's values are: rows `rows` (None: all) of checkpoint tensor `key`.

    `swap_halves`: the first and second half of the rows are exchanged (adaLN's shift and scale in diffusers' order).
    """

    key: str
    rows: Span | None = None
    swap_halves: bool = False


@dataclass(frozen=True)
class StepInputs:
    """What a family's `arguments` may use to call the model's own forward for one micro-step, all on the rank's device.

    `x`: [b, n, C] the rank's shard of the band's packed latent, reference tokens in their places, None where the rank has
    no prologue. In families of `whole_latent`: the latent [b, C, (T,) H, W] on every rank, zero outside of that shard (in
    all where there is no prologue), without reference tokens.
    `timestep`: [b] float32, or [b, T] or [b, N, 1] where each latent frame or each token of the whole video has its own, as
    the sampler gave it. `tensors`: the conditioning's, entries of this micro-step only. `grid`: the picture's tokens along
    its axes; `stream`: their order. `image`, `text`: the rank's tokens in that order and in the text. `text_tokens`: of the
    whole text. `kept`: shared by all micro-steps for the same tokens of the same conditioning.
    """

    x: torch.Tensor | None
    timestep: torch.Tensor
    tensors: dict[str, torch.Tensor]
    grid: tuple[int, ...]
    stream: Stream
    image: Span
    text: Span
    text_tokens: int = 0
    dtype: torch.dtype = torch.float32  # that the rank computes in
    kept: dict[Any, torch.Tensor] = field(default_factory=dict)

    def positions(self, top: int = 0, left: int = 0) -> torch.Tensor:
        """[n, 3] float32 of the rank's image tokens: (frame, row, column) from (0, `top`, `left`) on, for bands along rows;
        REFERENCE_POSITIONS' own.
        """
        if (top, left) not in self.kept:  # made on the host, which CUDA devices would have to be waited for
            self.kept[top, left] = self._positions(top, left)
        return self.kept[top, left]

    def _positions(self, top: int, left: int) -> torch.Tensor:
        places, (frames, rows, columns) = self.stream.places(self.image), (1, *self.grid)[-3:]
        sides = torch.arange(rows) + float(top), torch.arange(float(frames)), torch.arange(columns) + float(left)
        own = torch.cartesian_prod(*sides)[:, (1, 0, 2)]
        device = self.timestep.device
        references = self.tensors.get(REFERENCE_POSITIONS)
        whole = own.to(device) if references is None else torch.cat((own.to(device), references[0].float()))
        return whole[places.to(device)]

    def text_tensor(self, name: str, width: int) -> torch.Tensor:
        """Token tensor `name` [b, T, width]; on stages that are not sent it, zeros, of which only the shape is used."""
        given = self.tensors.get(name)
        if given is not None:
            return given
        return self.timestep.new_zeros(len(self.timestep), self.text_tokens, width, dtype=self.dtype)


@dataclass(frozen=True)
class Rows:
    """Which tokens of whole tensors the micro-step is about: a stage's slots cut arguments down to them (slots.py).

    `image`: index of the band's image tokens in the model's own order, of `image_tokens` (reference tokens come last
    there); `text`: the rank's text tokens, of which a list that has the image's padding alone has the first.
    """

    image: slice | torch.Tensor
    image_tokens: int
    text: Span
    text_first: bool

    def of_image(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """`value` has the whole image's tokens along `dim`."""
        return value[(slice(None),) * dim + (self.image,)]

    def of_joint(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """`value` has the whole sequence along `dim`, text and image in the family's order."""
        text_tokens = value.shape[dim] - self.image_tokens
        words, image = (text_tokens, self.image_tokens) if self.text_first else (self.image_tokens, text_tokens)
        first, second = value.split((words, image), dim)
        text, image = (first, second) if self.text_first else (second, first)
        own = self.text.before(text_tokens)
        parts = (text.narrow(dim, own.start, len(own)), self.of_image(image, dim))
        return torch.cat(parts if self.text_first else parts[::-1], dim)


Cut = Callable[[Any, Rows], Any]
"""Cuts an argument of a block, made for the whole sequence, down to the rank's tokens."""


@dataclass(frozen=True)
class BlockList:
    """One of the class's block lists: how its blocks are called, and what they return.

    `returns`: the streams ("text", "image") that a block returns, in its order. `image`, `text`: their argument names.
    `joined`: one stream ("image") holds the tokens of both, in the family's order. `cuts`: other arguments that have a
    token axis, in families of `whole_latent`. `attention`: name in a block of a module that looks at other tokens -> which
    tokens it is over. `prologue`: belongs to the first stage as a whole (a refiner), and is not counted among the blocks.
    `needs_text`: its blocks cannot run on no text at all, in families of `whole_latent`: they get a token then, of which
    nothing is used.
    `skips`: (blocks that have run, blocks) -> of how many, from the first on, later ones still want the output, beside that
    of the last to run (long skips): so many travel from stage to stage with the hidden states.
    """

    name: str
    returns: tuple[str, ...] = ("text", "image")
    image: str = "hidden_states"
    text: str = "encoder_hidden_states"
    joined: bool = False
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    attention: Mapping[str, str] = field(default_factory=lambda: {"attn": JOINT})
    prologue: bool = False
    needs_text: bool = False
    skips: Callable[[int, int], int] = lambda _done, _count: 0


@dataclass(frozen=True)
class Family:
    """One row of the registry. Names in `block_lists`, `prologue`, `epilogue` are attributes of the diffusers class.

    prologue: modules that only the first stage has; their outputs elsewhere are zeros of the hidden width.
    whole_latent: the class's forward takes a picture or video, not tokens: it gets a whole one, and its blocks' arguments
    are cut down to the rank's tokens. Token tensors are then whole on every rank of the first stage, at every micro-step.
    detect: key shapes -> is it this family. older_class: what folders made by older versions of diffusers call model_class.
    takes: a folder's config.json -> can it be this family, one of several that share a class. configure: key shapes -> the
    class's constructor arguments.
    recipe: constructor arguments -> parameter name -> Source.
    conditioning: constructor arguments, ComfyUI's keyword arguments of a model call (those in `accepts`) -> the tensors
    that the ranks need, batch first; ValueError for what is missing or cannot be forwarded.
    example: constructor arguments, text tokens -> random conditioning tensors of batch 1, to time the model with.
    time_embed: submodule whose first argument is the timestep, and the factor between the model's and its own. None: the
    class does not round what it is given.
    model_time: the sampler's timestep -> the model's, where that counts from noise to picture.
    padded: how many tokens the class makes of so many by adding some of its own, to the text and to the image. Those of the
    image follow it at once; they are taken for the first of the text, and are seen by layers over the image too.
    prepare: tells the model's own modules, before its forward, what the forward's arguments cannot.
    output: what the forward returns -> tokens [b, n, c], or a latent in families of `whole_latent`.
    drops_mask: the class's forward makes an attention mask for the whole sequence; the micro-step's text mask, which must
    say the same, is used instead.
    residuals: a ControlNet's outputs as ComfyUI names them ("input", "output") -> the block list behind whose blocks each
    is added to the image tokens.
    exact: conditioning tensors that no dtype but their own can hold.
    settings: what is part of the configuration and no argument of the class -> its value where neither a single file's
    header (JSON `config`, as Lightricks' files have it) nor a folder's config.json says it.
    native_values: constructor arguments -> attributes of ComfyUI's native model that its BaseModel reads, no tensors.
    unsupported: axes of the mesh on which the family cannot have more than one rank; "pipe" stands for bands too.
    in_comfyui: ComfyUI has a native model of this kind, whose MODEL ours can stand in for.
    ignored: keys (regular expressions) that a checkpoint may have and this family has no use for.
    """

    name: str
    model_class: str
    block_lists: tuple[BlockList, ...]
    prologue: tuple[str, ...]
    epilogue: tuple[str, ...]
    token_tensors: tuple[str, ...]  # conditioning tensors with a text token axis (axis 1), needed by the first stage
    vector_tensors: tuple[str, ...]  # conditioning tensors that every stage needs
    time_embed: tuple[str, float] | None
    latent_channels: Callable[[Config], int]
    blocks: Callable[[Config], dict[str, int]]  # block list -> how many, without those of `prologue` lists
    tensor_plan: Plan
    detect: Callable[[Shapes], bool]
    configure: Callable[[Shapes], Config]
    recipe: Callable[[Config], dict[str, Source]]
    arguments: Callable[[StepInputs, Config], dict[str, Any]]
    conditioning: Callable[[Config, dict[str, Any]], dict[str, torch.Tensor]]
    hidden: Callable[[Config], int] = lambda config: config["num_attention_heads"] * config["attention_head_dim"]
    heads: Callable[[Config], int] = lambda config: config["num_attention_heads"]
    key_heads: Callable[[Config], int | None] = lambda _config: None  # where heads share keys (grouped-query attention)
    head_size: Callable[[Config], int] = lambda config: config["attention_head_dim"]
    example: Callable[[Config, int], dict[str, torch.Tensor]] = lambda config, text_tokens: {
        "context": torch.randn(1, text_tokens, config["joint_attention_dim"])
    }
    patching: Patching = field(default_factory=Patching)
    whole_latent: bool = False
    older_class: str = ""
    takes: Callable[[Config], bool] = lambda _config: True
    native_values: Callable[[Config], Mapping[str, Any]] = lambda _config: {}
    accepts: tuple[str, ...] = ("context", "y", "guidance")
    exact: tuple[str, ...] = ()
    settings: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    drops_mask: bool = False
    residuals: Mapping[str, str] = field(default_factory=dict)
    text_first: bool = True  # joint sequence [text, image]; False: [image, text]
    model_time: Callable[[torch.Tensor], torch.Tensor] = lambda timestep: timestep
    padded: Callable[[int], int] = lambda tokens: tokens
    prepare: Callable[[nn.Module, StepInputs], None] = lambda _model, _step: None
    output: Callable[[torch.Tensor], torch.Tensor] = lambda out: out
    max_side: Callable[[Config], int | None] = lambda _config: None  # tokens; None: positions have no end
    key_aliases: dict[str, str] = field(default_factory=dict)  # key endings that some files use for others
    unsupported: tuple[str, ...] = ()
    in_comfyui: bool = True
    ignored: tuple[str, ...] = ()

    def run(self, model: nn.Module, step: StepInputs) -> torch.Tensor:
        """The model's own forward for one micro-step: [b, m, c], the picture's tokens among the rank's.

        Unless the stage ends it before its epilogue.
        """
        if self.whole_latent:
            step = replace(step, x=self._whole(model, step))
        self.prepare(model, step)
        out = self.output(model(**self.arguments(step, model.config), return_dict=False)[0])
        own = step.stream.images(step.image)
        if self.whole_latent:
            return self.patching.pack(out)[:, own.slice]
        return (
            out if len(own) == len(step.image) else out[:, step.stream.places(step.image).to(out.device) < step.stream.image]
        )

    def _whole(self, model: nn.Module, step: StepInputs) -> torch.Tensor:
        """[b, C, (T,) H, W] with the shard in its place."""
        batch, own = len(step.timestep), step.stream.images(step.image)
        sizes = self.patching.whole(step.grid)
        if step.x is None:
            return step.timestep.new_zeros(batch, self.latent_channels(model.config), *sizes, dtype=step.dtype)
        packed = step.x
        if len(own) < step.stream.image:
            packed = step.x.new_zeros(batch, step.stream.image, step.x.shape[-1])
            packed[:, own.slice] = step.x
        return self.patching.unpack(packed, sizes)

    def image_padding(self, grid: tuple[int, ...]) -> int:
        """Tokens that the class adds to the image."""
        return self.padded(math.prod(grid)) - math.prod(grid)

    def stream(self, grid: tuple[int, ...], references: int = 0) -> Stream:
        """The order of a request's image tokens."""
        return Stream(math.prod(grid), self.patching.row_tokens(grid), references)

    def owned(self, config: Config, span: Span) -> dict[str, range]:
        """`span` counts the blocks of all lists through; block list -> which of its own blocks fall into it.

        Lists of the prologue belong to the first stage. An empty range says on which side of it the stage is.
        """
        owned, start, counts = {}, 0, self.blocks(config)
        for spec in self.block_lists:
            if spec.prologue:
                owned[spec.name] = range(sys.maxsize) if span.start == 0 else range(sys.maxsize, sys.maxsize)
                continue
            count = counts[spec.name]
            owned[spec.name] = range(*sorted(min(max(edge - start, 0), count) for edge in (span.start, span.stop)))
            start += count
        return owned

    def carried(self, config: Config, boundary: int) -> tuple[str, ...]:
        """The blocks, as "<list>.<index>", whose outputs cross `boundary` (counted as in `owned`) with the hidden states."""
        done, counts = self.owned(config, Span(0, boundary)), self.blocks(config)
        return tuple(
            f"{name}.{index}"
            for name, skips in ((spec.name, spec.skips) for spec in self.block_lists if not spec.prologue)
            for index in range(skips(done[name].stop, counts[name]))
        )

    def block_count(self, config: Config) -> int:
        return sum(self.blocks(config).values())
