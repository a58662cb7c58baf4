"""What a family is: a few records, each read by another part of the code, and every field documented where it stands."""

import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder

from .blocks import Blocks
from .patching import Latents, Patching, side_by_side
from .step_inputs import Config, Shapes, StepInputs
from .tensor_plan import LayerCuts


def name_pattern(name: str) -> str:
    """The regular expression for the modules that a family means by `name`: a star in front stands for a block
    ("<list>.<index>"), elsewhere for an index."""
    star = r"[^.]+\.[^.]+" if name.startswith("*") else r"[^.]+"
    return re.escape(name).replace(r"\*", star)


@dataclass(frozen=True)
class Source:
    """Where the values of a parameter are in a checkpoint."""

    key: str
    """Name of the checkpoint's tensor."""

    rows: Span | None = None
    """Rows of that tensor. None: all."""

    swap_halves: bool = False
    """The first and the second half of the rows are exchanged: adaLN's shift and scale, in diffusers' order."""

    flat: bool = False
    """The tensor is a vector of the parameter's values: diffusers has a row for each part of a modulation."""


@dataclass(frozen=True)
class HeaderConfig:
    """What the header of a single file may say of a model that its tensors do not show.

    ComfyUI hands the JSON object `config`, `transformer` of a safetensors header to its own class, and tells some models
    apart by nothing else. A file whose header asks for something else than this family computes is refused.
    """

    values: Mapping[str, Callable[[Config], tuple[Any, ...]]]
    """Entry -> the values that this family computes with, lists as tuples. All that ComfyUI's class reads, without
    `FileLayout.settings`."""

    others: bool
    """Entries of other names are allowed: ComfyUI's class takes no notice of them. Otherwise they are refused."""

    arguments: Callable[[Mapping[str, Any]], Config] = lambda _header: {}
    """What the header says -> arguments of the class's constructor that no tensor shows. `FileLayout.configure` goes before
    it. ValueError if the header does not say enough."""

    takes: Callable[[Mapping[str, Any]], bool] = lambda _header: True
    """Whether a file whose header says this is of the family, where several families have the same keys."""


def header_arguments(*names: str) -> dict[str, Callable[[Config], tuple[Any, ...]]]:
    """`HeaderConfig.values` for entries that have the name and the value of an argument of the class's constructor."""
    return {name: lambda config, name=name: (config[name],) for name in names}


@dataclass(frozen=True)
class FolderLayout:
    """How the family's diffusers folders differ from what its class saves."""

    takes: Callable[[Config], bool] = lambda _config: True
    """Whether a folder with this config.json is of this family, where several families share a class."""

    source: Callable[[Config, str], Source] = lambda _config, parameter: Source(parameter)
    """Parameter of the class -> its source in the folder, another one where the class is one of ours."""

    older_class: str = ""
    """`Family.model_class` in the folders that older versions of diffusers made."""


@dataclass(frozen=True)
class FileLayout:
    """How checkpoints of the family are recognised and read. Read by checkpoints/.

    Single files have the original key layout, which is that of ComfyUI's own model class. Folders have diffusers'. A method
    has the usual answer: a family with another one overrides the method, in a class in the family's own file. The same
    holds for Sizes, Inputs, Forward and BlockList.
    """

    detect: Callable[[Shapes], bool]
    """Whether a single file with these keys and shapes is of this family. True for one family at most."""

    configure: Callable[[Shapes], Config]
    """Keys and shapes of a single file -> arguments of the class's constructor. ValueError for a model that cannot run."""

    key_map: Callable[[Config], dict[str, Source]]
    """Constructor arguments -> every parameter of the class -> its source in the original key layout. ValueError for a
    configuration that cannot run."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Endings of keys that some files use -> the usual ones."""

    ignored: tuple[str, ...] = ()
    """Keys (regular expressions) that a file may have and the class has no use for. Other keys without use are refused."""

    settings: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    """Entries of the configuration that the class's constructor does not take -> their value where neither a single file's
    header (JSON `config`, as in Lightricks' files) nor a folder's config.json says it."""

    header: HeaderConfig | None = None
    """What a single file's header may say. None: ComfyUI does not read it for models of this kind."""

    folder: FolderLayout = FolderLayout()
    """How diffusers folders are recognised and read. Usually as the class saves them."""

    max_settings: Mapping[str, int] = field(default_factory=dict)
    """Settings that the constructor makes tables from -> the largest value that is built. Others have a common limit."""

    def takes_header(self, header: Mapping[str, Any]) -> bool:
        """Whether a single file whose header says this is of the family."""
        return self.header is None or self.header.takes(header)

    def computed(self, config: Config) -> Mapping[str, tuple[int, ...]]:
        """Tensors of the original layout that the class computes itself -> their shapes. ComfyUI's detection looks at them;
        a file may lack them."""
        return {}

    def check_together(self, name: str, settings: Mapping[str, Any]) -> None:
        """ValueError for settings of checkpoint `name` each of which is within its limit, while all together are not."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, each from its constructor arguments. Read for refusals, memory, cost and tensor parallelism."""

    latent_channels: Callable[[Config], int]
    """Channels of the latent, with those of pictures that are joined to it."""

    hidden: Callable[[Config], int] = lambda config: config["num_attention_heads"] * config["attention_head_dim"]
    """Channels of a token between blocks."""

    heads: Callable[[Config], int] = lambda config: config["num_attention_heads"]
    """Attention heads."""

    key_heads: Callable[[Config], int | None] = lambda _config: None
    """Heads of keys and values, with grouped-query attention. None: as many as `heads`."""

    head_size: Callable[[Config], int] = lambda config: config["attention_head_dim"]
    """Channels of a head."""

    max_side: Callable[[Config], int | None] = lambda _config: None
    """Tokens along a side that there are positions for. None: any number."""

    def text_hidden(self, config: Config) -> int | None:
        """Channels of the text stream's tokens between blocks. None: as many as the image's. At most as many."""
        return None


Finish = Callable[[Latents], Latents]
"""A model's outputs -> the sampler's, see `Inputs.carried`."""


@dataclass(frozen=True)
class Inputs:
    """What a sampler's model call becomes before it is sent. Read in ComfyUI's process.

    A conditioning tensor is batch first. Besides those named here every family may have those of base/step_inputs.py.
    """

    conditioning: Callable[[Config, dict[str, Any]], dict[str, torch.Tensor]]
    """Arguments of ComfyUI's model call, and `latent`, the shape of the latent or of a band's -> conditioning tensors.
    ValueError, beginning with the input's name, for what is missing or cannot be forwarded. Where the family takes a
    companion latent, `grid` and `companion_tokens` are among the arguments: the whole video's tokens by axis, and the
    companion's."""

    accepts: tuple[str, ...] = ("context", "y", "guidance")
    """Arguments of ComfyUI's model call that `conditioning` knows. All others are refused."""

    token_tensors: tuple[str, ...] = ()
    """Conditioning tensors [B, T, ...] of the text that runs through the blocks. Only the first stage gets them. Several of
    them, one behind the other, only where `Forward.whole_latent`."""

    whole_text: bool = False
    """The prologue mixes the text's tokens, so every rank of the first stage has all of them at every micro-step, and
    `Forward.prepare` sees to it that the blocks get the rank's own. So it is in any case with `Forward.whole_latent`."""

    vector_tensors: tuple[str, ...] = ()
    """Conditioning tensors that every stage gets."""

    exact: tuple[str, ...] = ()
    """Conditioning tensors that keep their dtype: positions, sizes, rates, which bf16 cannot hold."""

    example: Callable[[Config, int], dict[str, torch.Tensor]] = lambda config, text_tokens: {
        "context": torch.randn(1, text_tokens, config["joint_attention_dim"])
    }
    """(constructor arguments, text tokens) -> random conditioning tensors of batch 1, to time and to size the model with."""

    check_grid: Callable[[tuple[int, ...], dict[str, torch.Tensor]], None] = lambda _grid, _tensors: None
    """ValueError, beginning with the input's name, for conditioning tensors that do not fit the latent's grid of tokens."""

    options: tuple[str, ...] = ()
    """Entries of ComfyUI's transformer_options that `conditioning` and `carried` get too, where there are such."""

    def references(self, call: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Arguments of ComfyUI's model call -> the latents in them that become tokens of references (REFERENCES)."""
        return call.get("ref_latents") or ()

    def carried(self, latents: Latents, timestep: torch.Tensor, call: dict[str, Any]) -> tuple[Latents, Finish]:
        """Where a sampler carries latents in another form than the model takes them: (a call's latents, its timestep, its
        arguments) -> latents as the model takes them, and what makes the sampler's outputs of the model's."""
        return latents, lambda outputs: outputs

    def padded(self, tokens: int) -> int:
        """Tokens -> tokens with those that the class itself adds, to the text and to the image alike. Those of the image
        follow it at once; they count as the first of the text, and layers over the image see them too."""
        return tokens

    def text_tokens(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Tokens of the text that runs through the blocks: of all `token_tensors`, with those that the class adds."""
        lengths = [tensors[name].shape[1] for name in self.token_tensors if name in tensors]
        return self.padded(sum(lengths)) if lengths else 0


@dataclass(frozen=True)
class TextModel:
    """Part of a single file that ComfyUI's BaseModel has its native model run on a prompt's text (`preprocess_text_embeds`).

    It runs in ComfyUI's process, once for a prompt. The ranks do not have it.
    """

    prefixes: tuple[str, ...]
    """Keys of its tensors, in the original layout, begin with one of these."""

    run: Callable[[Config, Callable[[str], dict[str, torch.Tensor]], torch.Tensor, bool], torch.Tensor]
    """(configuration; prefix of keys -> those tensors, by the rest of the key, in the text's dtype and on its device; text
    [B, T, C]; whether the text encoder says that it is unprocessed) -> text [B, T', C']."""


class CacheScope(Enum):
    """Micro-steps that have a module's output in common. They have the same conditioning and batch entries in any case."""

    CALL = "call"  # those of one timestep
    PROMPT = "prompt"  # all
    BAND = "band"  # those for the same tokens


def cached(call: Iterable[str] = (), prompt: Iterable[str] = (), band: Iterable[str] = ()) -> dict[str, CacheScope]:
    """`Forward.cached_modules`: names of submodules, by the scope of each."""
    names = {CacheScope.CALL: call, CacheScope.PROMPT: prompt, CacheScope.BAND: band}
    return {name: scope for scope, group in names.items() for name in group}


@dataclass(frozen=True)
class TimeEmbed:
    """The module that embeds the timestep. It is handed the timestep in float32: diffusers rounds it to bf16 first, which
    moves Flux's output by 4 %."""

    module: str
    """Submodule of the class whose first argument is the timestep."""

    factor: float = 1.0
    """Between the model's timestep and that argument."""

    model_time: Callable[[torch.Tensor], torch.Tensor] = lambda timestep: timestep
    """The sampler's timestep -> the model's, where that counts from noise to picture."""


@dataclass(frozen=True)
class Forward:
    """How a rank calls the class's own forward, and what that forward does. Read by rank/."""

    arguments: Callable[[StepInputs, Config], dict[str, Any]]
    """A micro-step -> keyword arguments of the forward."""

    whole_latent: bool = False
    """The forward takes a picture or a video, not tokens. It gets a whole one, zero outside of the rank's tokens, and the
    blocks' arguments are cut down to those. Token tensors are then whole on every rank of the first stage, at every
    micro-step."""

    time_embed: TimeEmbed | None = None
    """None: the class does not round the timestep."""

    output: Callable[[torch.Tensor], torch.Tensor] = lambda out: out
    """What the forward returns -> tokens [b, n, c], or a latent where `whole_latent`."""

    cached_modules: Mapping[str, CacheScope] = field(default_factory=dict)
    """Submodules whose output many micro-steps share -> which. Each is computed once for those. In a name, a star in front
    stands for a block ("<list>.<index>"), elsewhere for an index. tests/rank/test_module_cache.py finds what is missing."""

    drops_mask: ClassVar[bool] = False
    """The forward makes an attention mask for the whole sequence. The TEXT_MASK, which says the same, is used instead."""

    untraced: ClassVar[tuple[str, ...]] = ()
    """Modules of a block, by name in it, that torch.compile cannot trace, as sizes in them depend on values. Their output
    has their input's shape."""

    weight_readers: ClassVar[tuple[str, ...]] = ()
    """Submodules that hand the weights of their linear layers to a function of torch, rather than call the layers. LoRA is
    added to those weights, not beside them."""

    def prepare(self, model: nn.Module, step: StepInputs) -> None:
        """Tells modules of the model, before the forward, what the forward's arguments cannot."""

    def float32(self, config: Config) -> tuple[str, ...]:
        """Modules and parameters that are float32 whatever dtype the blocks compute in: as in ComfyUI's class, or since ours
        adds to them in float32. Names as in `cached_modules`; one that begins with a dot is an ending of parameters'
        names."""
        return ()


@dataclass(frozen=True)
class Family:
    """One row of the registry: a diffusers class, and all that is particular to it."""

    name: str
    """As users read it in messages and calibrations."""

    model_class: str
    """The transformer's class, as a folder's config.json names it too."""

    native_classes: tuple[str, ...]
    """Classes of ComfyUI's supported_models whose transformer this family computes. A file that ComfyUI takes for another
    one is refused."""

    file: FileLayout
    blocks: Blocks
    sizes: Sizes
    inputs: Inputs
    forward: Forward

    tensor_plan: LayerCuts
    """Which layers tensor parallelism cuts, and how. Applied by rank/stage/tensor_parallel.py."""

    class_module: str = "diffusers"
    """Module that has `model_class`: one of ours where diffusers has no such class, or lacks what the files need."""

    patching: Patching = field(default_factory=Patching)
    """How latents become tokens."""

    half_dtypes: Callable[[Config], tuple[str, ...]] = lambda _config: ("bf16",)
    """Those of core.dtypes.HALVES that the model can be computed in, the best first, as ComfyUI has them
    (supported_inference_dtypes)."""

    text_model: TextModel | None = None
    """What a prompt's text goes through before the ranks get it."""

    native_values: Callable[[Config], Mapping[str, Any]] = lambda _config: {}
    """Attributes, no tensors, of ComfyUI's native model that its BaseModel reads -> their values."""

    @property
    def whole_text(self) -> bool:
        """Every rank of the first stage has the whole text."""
        return self.forward.whole_latent or self.inputs.whole_text

    def transformer_class(self) -> type[nn.Module]:
        """The class itself. Importing diffusers takes seconds, so only what needs the class asks for it."""
        return getattr(importlib.import_module(self.class_module), self.model_class)

    def stays_float32(self, config: Config, parameter: str) -> bool:
        """Whether a parameter is float32 whatever dtype the blocks compute in."""
        names = self.forward.float32(config)
        endings = tuple(name for name in names if name.startswith("."))
        return parameter.endswith(endings) or any(re.match(f"{name_pattern(name)}(\\.|$)", parameter) for name in names)

    def run(self, model: nn.Module, step: StepInputs) -> torch.Tensor:
        """Run the model's own forward for one micro-step; [b, m + a, c], the rank's tokens of the picture, then those of the
        companion latent, which are the second that the forward returns.

        The stage's stand-ins end the forward early where the epilogue is not this rank's.
        """
        if self.forward.whole_latent:
            step = replace(step, x=self._whole(model, step))
        self.forward.prepare(model, step)
        outputs = model(**self.forward.arguments(step, model.config), return_dict=False)
        out, own = self.forward.output(outputs[0]), step.token_order.images(step.image)
        if self.forward.whole_latent:
            out = self.patching.cut(step.token_order.along).pack(out)[:, own.slice]
        elif len(own) < len(step.image):
            out = out[:, step.of_tokens("picture rows", step.token_order.picture_rows)]
        return side_by_side(out, outputs[1]) if step.companion_tokens else out

    def _whole(self, model: nn.Module, step: StepInputs) -> torch.Tensor:
        """The whole latent [b, C, (T,) H, W], zero outside of the rank's tokens."""
        batch, own = len(step.timestep), step.token_order.images(step.image)
        sizes = self.patching.whole(step.grid)
        if step.x is None:
            return step.timestep.new_zeros(batch, self.sizes.latent_channels(model.config), *sizes, dtype=step.dtype)
        packed = step.x
        if len(own) < step.token_order.image:
            packed = step.x.new_zeros(batch, step.token_order.image, step.x.shape[-1])
            packed[:, own.slice] = step.x
        return self.patching.cut(step.token_order.along).unpack(packed, sizes)

    def image_padding(self, grid: tuple[int, ...]) -> int:
        """Tokens that the class adds to the image."""
        return self.inputs.padded(math.prod(grid)) - math.prod(grid)

    def text_tokens(self, grid: tuple[int, ...], companion_tokens: int, tensors: Mapping[str, torch.Tensor]) -> int:
        """Tokens of a call beside the image's own: what the class adds to it, `companion_tokens`, the text.

        They run with the call's first band.
        """
        return self.image_padding(grid) + companion_tokens + self.inputs.text_tokens(tensors)

    def example(self, config: Config, prompt: int) -> dict[str, torch.Tensor]:
        """Shapes of a conditioning whose text has `prompt` tokens, on the meta device: a sampler's noise may come from the
        global generator, which must not be drawn from."""
        with torch.device("meta"):
            return self.inputs.example(config, prompt)

    def token_order(self, grid: tuple[int, ...], references: int = 0, along: str = "rows") -> TokenOrder:
        """The order of a request's image tokens, for bands along that axis."""
        return TokenOrder(math.prod(grid), self.patching.cut(along).row_tokens(grid), references, along)
