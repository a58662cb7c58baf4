"""What a family is to the backend: data, and a few functions of a line or two."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder

from .patching import Patching
from .step_inputs import Config, Cut, Shapes, StepInputs
from .tensor_plan import Plan

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

    def stream(self, grid: tuple[int, ...], references: int = 0) -> TokenOrder:
        """The order of a request's image tokens."""
        return TokenOrder(math.prod(grid), self.patching.row_tokens(grid), references)

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
