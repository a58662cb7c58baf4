"""The record of a family and its parts. Each part is read by another room; each field is documented below it."""

import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn

from parallel_backend.core.token_order import TokenOrder

from .blocks import Blocks
from .file_layout import FileLayout
from .patching import Latents, Patching, latents_of
from .step_inputs import Config, StepInputs
from .tensor_plan import LayerCuts


def name_pattern(name: str) -> str:
    """Regular expression for the modules that a family's record calls `name`. A star stands for a block ("<list>.<index>")
    at the beginning of the name, for an index elsewhere."""
    star = r"[^.]+\.[^.]+" if name.startswith("*") else r"[^.]+"
    return re.escape(name).replace(r"\*", star)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, computed from its constructor arguments. Used for refusals, memory, cost and tensor parallelism."""

    latent_channels: Callable[[Config], int]
    """Channels of the latent, including those of pictures that are concatenated to it."""
    hidden: Callable[[Config], int] = lambda config: config["num_attention_heads"] * config["attention_head_dim"]
    """Channels of a token between blocks."""
    heads: Callable[[Config], int] = lambda config: config["num_attention_heads"]
    """Attention heads."""
    sharing: Callable[[Config], int] = lambda _config: 1
    """How many of `heads` in a row have the same keys and values."""
    head_units: Callable[[Config], int] = lambda _config: 0
    """Equal units of `heads` that tensor ranks have whole, if queries that share keys have them repeated. 0: each head."""
    head_size: Callable[[Config], int] = lambda config: config["attention_head_dim"]
    """Channels of a head."""
    max_side: Callable[[Config], int | None] = lambda _config: None
    """Largest number of tokens along a side that has positions. None: any number."""


def pairs_of(hidden: int) -> float:
    """Family.attention_share of a block of width h. Its linear layers have 12 h^2 weights, so 24 h^2 operations for a token.
    Its attention takes 4 h operations for a query and a key."""
    return 1 / (6 * hidden)


class Counted(NamedTuple):
    """A call's tokens, as far as memory and time go."""

    grid: tuple[int, ...]
    """The image's, by axis."""
    text: int
    """Others."""
    streams: tuple[tuple[int, int], ...] = ()
    """(stream, its part of `text`), for layers over StreamKeys. Empty: unknown."""
    references: int = 0
    """Tokens of reference pictures, which are not among the others."""


@dataclass(frozen=True)
class Inputs:
    """How a sampler's model call becomes latents and conditioning tensors for the ranks. Used in ComfyUI's process.

    Conditioning tensors are batch first. In addition to those named here, every family may have those of
    base/step_inputs.py.
    """

    conditioning: Callable[[Config, dict[str, Any]], dict[str, torch.Tensor]]
    """(constructor arguments, `call`) -> conditioning tensors. `call`: keyword arguments of ComfyUI's model call, and
    `latent`, the shape of the latent or of a band. ValueError, beginning with the input's name, for what is missing or
    cannot be forwarded."""

    accepts: tuple[str, ...] = ("context", "y", "guidance")
    """Arguments of ComfyUI's model call that `conditioning` knows. All others are refused."""

    token_tensors: tuple[str, ...] = ()
    """Conditioning tensors [B, T, ...] of the text that runs through the blocks, concatenated in this order. Only the first
    stage gets them. More than one only with `Forward.whole_latent`."""

    whole_text: bool = False
    """The prologue mixes the text's tokens, so every rank of the first stage gets all of them at every micro-step. Implied
    by `Forward.whole_latent`."""

    vector_tensors: tuple[str, ...] = ()
    """Conditioning tensors that every stage gets."""

    exact: tuple[str, ...] = ()
    """Conditioning tensors that keep their dtype, since bf16 cannot hold positions, sizes and rates."""

    example: Callable[[Config, int], dict[str, torch.Tensor]] = lambda config, text_tokens: {
        "context": torch.randn(1, text_tokens, config["joint_attention_dim"])
    }
    """(constructor arguments, text tokens) -> random conditioning tensors of batch 1, for timing and sizing the model."""

    check_grid: Callable[[tuple[int, ...], dict[str, torch.Tensor]], None] = lambda _grid, _tensors: None
    """ValueError, beginning with the input's name, for conditioning tensors that do not fit the latent's grid of tokens."""

    options: tuple[str, ...] = ()
    """This pack's entries of transformer_options that ranks get, of ComfyUI's own class."""

    latent_everywhere: ClassVar[bool] = False
    """Every stage gets the latent, and not the first alone."""

    keeps_dtypes: ClassVar[bool] = False
    """All conditioning tensors are as those of `exact`."""

    def is_everywhere(self, name: str) -> bool:
        """Whether every stage gets this conditioning tensor whole."""
        return name in self.vector_tensors

    def references(self, call: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Latents in a call's arguments that become reference tokens."""
        return call.get("ref_latents") or ()

    def text_tokens(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Tokens of the text that runs through the blocks: of all `token_tensors`."""
        return sum(tensors[name].shape[1] for name in self.token_tensors if name in tensors)


class CacheScope(Enum):
    """Which micro-steps with the same conditioning and batch entries share a module's output."""

    CALL = "call"  # those of one timestep
    PROMPT = "prompt"  # all
    BAND = "band"  # those with the same tokens


def cached(call: Iterable[str] = (), prompt: Iterable[str] = (), band: Iterable[str] = ()) -> dict[str, CacheScope]:
    """`Forward.cached_modules`: names of submodules, by the scope of each."""
    names = {CacheScope.CALL: call, CacheScope.PROMPT: prompt, CacheScope.BAND: band}
    return {name: scope for scope, group in names.items() for name in group}


@dataclass(frozen=True)
class Forward:
    """How a rank calls the class's forward, and what that forward does. Used by rank/."""

    arguments: Callable[[StepInputs, Config], dict[str, Any]]
    """A micro-step -> keyword arguments of the forward."""

    whole_latent: bool = False
    """The forward takes a latent, not tokens. It gets a whole latent that is zero outside of the rank's tokens, and the
    blocks' arguments are cut down to those tokens. At every micro-step, token tensors are whole on every rank of the first
    stage."""

    cached_modules: Mapping[str, CacheScope] = field(default_factory=dict)
    """Submodules whose output is computed once for all micro-steps of a scope. Names: see `name_pattern`.
    tests/rank/test_module_cache.py finds modules that are missing here."""

    def float32(self, config: Config) -> tuple[str, ...]:
        """Modules and parameters that stay float32 in every compute dtype, as in ComfyUI's class, or since the forward
        computes with them in float32. Names: see `name_pattern`; those with a dot in front are endings of parameters."""
        return ()


@dataclass(frozen=True)
class Family:
    """One row of the registry: a transformer class with everything that the backend knows about it."""

    name: str
    """Name in messages to users and in calibrations."""

    model_class: str
    """The transformer's class."""

    native_classes: tuple[str, ...]
    """Classes of ComfyUI's supported_models whose transformer this family computes. A file that ComfyUI detects as any other
    class is refused."""

    file: FileLayout
    blocks: Blocks
    sizes: Sizes
    inputs: Inputs
    forward: Forward

    tensor_plan: LayerCuts
    """How tensor parallelism cuts layers. Applied by rank/stage/tensor_parallel.py."""

    class_module: str = "diffusers"
    """Module that has `model_class`: one of families/models where diffusers has no class that fits the files."""

    patching: Patching = field(default_factory=Patching)
    """How latents become tokens."""

    half_dtypes: Callable[[Config], tuple[str, ...]] = lambda _config: ("bf16",)
    """Compute dtypes among core.dtypes.HALVES, the best first, as in ComfyUI's supported_inference_dtypes."""

    node_tensors: tuple[str, ...] = ()
    """Tensors of a single file, in the original layout, whose values nodes read off ComfyUI's native model. The ranks do not
    have them."""

    native_values: Callable[[Config], Mapping[str, Any]] = lambda _config: {}
    """Attributes of ComfyUI's native model, other than tensors, that its BaseModel or a node reads -> their values. Names of
    what is inside its modules: see `name_pattern`."""

    def is_elsewhere(self, parameter: str) -> bool:
        """No rank has this parameter of the class: ComfyUI's process computes with it."""
        return False

    @property
    def whole_text(self) -> bool:
        """Every rank of the first stage has the whole text."""
        return self.forward.whole_latent or self.inputs.whole_text

    def transformer_class(self) -> type[nn.Module]:
        """The class. Imported here and not with this module, since importing diffusers takes seconds."""
        return getattr(importlib.import_module(self.class_module), self.model_class)

    def stays_float32(self, config: Config, parameter: str) -> bool:
        """Whether a parameter stays float32 in every compute dtype."""
        names = self.forward.float32(config)
        endings = tuple(name for name in names if name.startswith("."))
        return parameter.endswith(endings) or any(re.match(f"{name_pattern(name)}(\\.|$)", parameter) for name in names)

    def run(self, model: nn.Module, step: StepInputs) -> torch.Tensor:
        """Run the model's forward for one micro-step -> [b, m, c]: the rank's m image tokens.

        On ranks without the epilogue, stand-ins for its modules end the forward early.
        """
        if self.forward.whole_latent:
            step = replace(step, x=self._whole(model, step))
        out = model(**self.forward.arguments(step, cast(Config, model.config)), return_dict=False)[0]
        if self.forward.whole_latent:
            out = self.patching.cut(step.token_order.along).pack(out)[:, step.image.slice]
        return out

    def _whole(self, model: nn.Module, step: StepInputs) -> torch.Tensor:
        """The whole latent [b, C, (T,) H, W], zero outside of the rank's tokens."""
        batch, sizes = len(step.timestep), self.patching.whole(step.grid)
        if step.x is None:
            return step.timestep.new_zeros(
                batch, self.sizes.latent_channels(cast(Config, model.config)), *sizes, dtype=step.dtype
            )
        packed = step.x
        if len(step.image) < step.token_order.image:
            packed = step.x.new_zeros(batch, step.token_order.image, step.x.shape[-1])
            packed[:, step.image.slice] = step.x
        return self.patching.cut(step.token_order.along).unpack(packed, sizes)

    @property
    def title(self) -> str:
        """Name for the user."""
        return self.name

    @property
    def kind(self) -> str:
        """Name of the family, or of ComfyUI's own class with its arguments. Models of one kind take alike long."""
        return self.name

    def attention_share(self, config: Config, block_list: str) -> float:
        """In a block of the list: operations of attention for a query and a key, divided by those of a token's layers."""
        return pairs_of(self.sizes.hidden(config))

    def noise(self, shape: tuple[int, ...]) -> Latents:
        """Random latents of a model call, of which the first has this shape."""
        return latents_of(self.patching.alongside(torch.randn(shape)))

    def text_tokens(self, grid: tuple[int, ...], companion_tokens: int, tensors: Mapping[str, torch.Tensor]) -> int:
        """Tokens of a call that are not the image's: `companion_tokens`, text. All run with the first band."""
        return companion_tokens + self.inputs.text_tokens(tensors)

    def reference_tokens(self, call: Mapping[str, Any]) -> int:
        """Number of reference tokens of a model call with these arguments, of the latents that `Inputs.references` names."""
        latents, video = self.inputs.references(call), self.patching.video
        pictures = (latent.unsqueeze(2) if video and latent.ndim == 4 else latent for latent in latents)
        return sum(math.prod(self.patching.grid(tuple(picture.shape))) for picture in pictures)

    def counted(self, grid: tuple[int, ...], text: int, tensors: Mapping[str, torch.Tensor]) -> Counted:
        """A call's tokens. `text`: see text_tokens."""
        return Counted(grid, text)

    def example(self, config: Config, prompt: int) -> dict[str, torch.Tensor]:
        """Conditioning tensors whose text has `prompt` tokens, on the meta device: drawing values would advance the global
        generator, from which a sampler's noise may come."""
        with torch.device("meta"):
            return self.inputs.example(config, prompt)

    def token_order(self, grid: tuple[int, ...], references: int = 0, along: str = "rows") -> TokenOrder:
        """The order of a call's image tokens, for bands along the axis `along`."""
        return TokenOrder(math.prod(grid), self.patching.cut(along).row_tokens(grid), references, along)
