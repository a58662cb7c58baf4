"""The Family of a class that no family knows, made when its file is opened."""

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.own_class import COMPANION, WORDS, OwnAttention, OwnClass, OwnLatent
from parallel_backend.families.base.blocks import Blocks, Over, StreamKeys
from parallel_backend.families.base.family import Counted, Family, Forward, Inputs, Sizes, cached
from parallel_backend.families.base.file_layout import FileLayout, Source
from parallel_backend.families.base.patching import Companion, Latents, Patching
from parallel_backend.families.base.step_inputs import Config, StepInputs
from parallel_backend.families.base.tensor_plan import COLUMN_BY_HEADS

from .adapters import gate_of, node_tensors_of, only_here, options_of, own_name
from .band_tokens import BandTokens, class_numbers
from .building import build
from .call_arguments import LATENT, OPTIONS, STRUCTURE, from_tensors, structure_of, timestep_of
from .call_form import LATENTS, pack, unpack
from .call_form import run as run_in_form
from .counts import counted, counts_of
from .feature_cut import layer_cut
from .guided_attention import GUIDED, Guided, own_sums
from .residuals import CONTROL, by_kind
from .second_text import ADD_UP, SECOND, WHOLE_HEADS
from .stages import StageBlocks
from .token_cut import entries_of
from .tried_calls import Call

NAME = "ComfyUI's own class"
NUMBERS = "numbers"
"""Key of StepInputs.kept."""
WHOLE_STATES = 3
"""Blocks.whole_states: what enters the blocks, or what leaves them while the class norms and modulates it."""
STAGE = "parallel_dit_stage"
"""Attribute of a rank's model that has its StageBlocks."""


@dataclass(frozen=True)
class OwnBlocks(Blocks):
    """Blocks that stages share out by their places in the order of a call."""

    adds_residuals: ClassVar[bool] = True
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Block's name -> (its list, its number in it)."""

    own: OwnClass = field(kw_only=True)

    @property
    def joint(self) -> bool:
        return self.own.joint

    def attention(self, targets: Iterable[str]) -> tuple[tuple[Over, ...], ...]:
        """As Blocks.attention: of calls whose tokens are cut, since the others keep no keys."""
        latent = None if self.own.latent is None else set(self.own.latent.streams)

        def over(call: OwnAttention) -> StreamKeys:
            return StreamKeys(latent is None or bool(latent & set(call.keys)), call.keys, call.head_size)

        return tuple(tuple(over(call) for call in block.attention if call.keys) for block in self.own.blocks)

    def names(self, config: Config) -> list[str]:
        return [block.name for block in self.own.blocks]

    def place(self, target: str) -> tuple[str, int] | None:
        parts = target.split(".")
        names = (".".join(parts[:count]) for count in range(2, len(parts)))
        return next((self.places[name] for name in names if name in self.places), None)


@dataclass(frozen=True)
class OwnInputs(Inputs):
    """Every stage runs the prologue. ComfyUI has given each tensor the dtype that the class gets. `words`: see OwnLatent."""

    latent_everywhere: ClassVar[bool] = True
    keeps_dtypes: ClassVar[bool] = True
    words: bool = False

    def is_everywhere(self, name: str) -> bool:
        return True

    def text_tokens(self, tensors: Mapping[str, torch.Tensor]) -> int:
        context = tensors.get("context") if self.words else None
        return context.shape[1] if context is not None and context.ndim == 3 else 0


@dataclass(frozen=True)
class OwnForward(Forward):
    """`exact`: parameters and tables that the class keeps in float32 when it is built in another dtype."""

    exact: tuple[str, ...] = ()

    def float32(self, config: Config) -> tuple[str, ...]:
        return self.exact


@dataclass(frozen=True)
class OwnClassFamily(Family):
    """The family of `own`."""

    own: OwnClass | None = None
    parameters: frozenset[str] = frozenset()
    """Names of the class's parameters. Its other tensors are computed where a file lacks them."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of all of the class's tensors."""
    call: Call | None = None
    """The call that a trial was made for, see example.py. None: there was none in this process."""

    def is_elsewhere(self, parameter: str) -> bool:
        """As Family.is_elsewhere."""
        assert self.own is not None
        return parameter.startswith(tuple(f"{module}." for module in only_here(self.own.kind)))

    @property
    def title(self) -> str:
        """As Family.title."""
        return f"{self.name} {self.model_class}"

    @property
    def kind(self) -> str:
        """As Family.kind."""
        assert self.own is not None
        return f"{self.own.name} {self.own.arguments}"

    def attention_share(self, config: Config, block_list: str) -> float:
        """As Family.attention_share, of the call that a trial was made for."""
        assert self.own is not None
        counts = None if self.call is None else counted(self.own, self.call)
        if counts is None:
            return super().attention_share(config, block_list)
        tokens = counts.states / self.sizes.hidden(config)
        of_list = (
            each for block, each in zip(self.own.blocks, counts.blocks, strict=True) if block.name.startswith(block_list)
        )
        work = next(of_list)
        return work.attention / max(1, work.layers) / tokens

    def example(self, config: Config, prompt: int) -> dict[str, torch.Tensor]:
        """As Family.example. The conditioning of a call that was tried has values, and draws none."""
        return super().example(config, prompt) if self.call is None else self.inputs.example(config, prompt)

    def noise(self, shape: tuple[int, ...]) -> Latents:
        """As Family.noise. Nested latents without proven bands are packed."""
        if self.call is not None and LATENTS in self.call.named and self.patching.companion is None:
            return (torch.randn(shape[0], *self.call.x.shape[1:]),)
        return super().noise(shape)

    def counted(self, grid: tuple[int, ...], text: int, tensors: Mapping[str, torch.Tensor]) -> Counted:
        """As Family.counted, with the tokens that the class itself makes. Without proven bands all tokens are along the
        grid's first axis."""
        counts = None if self.own is None else counts_of(self.own, tensors)
        if counts is None or self.own is None:
            return Counted(grid, text)
        latent = self.own.latent
        if latent is None:
            tokens = math.ceil(counts.states / self.sizes.hidden({}))
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
        """Words, and tokens of a second latent, in the latent's stream."""
        words = self.inputs.text_tokens(tensors) if WORDS in latent.layout else 0
        if COMPANION not in latent.layout:
            return words
        shapes = [(1, *shape) for shape in structure_of(tensors)[LATENTS]]
        return words + self.patching.companion_tokens(shapes)

    def run(self, model: nn.Module, step: StepInputs) -> torch.Tensor:
        """As Family.run. A stage that is not the last one returns no tokens."""
        assert step.x is not None, "every stage has the latent"
        patching, order = self.patching.cut(step.token_order.along), step.token_order
        stage: StageBlocks = vars(model)[STAGE]
        pictures, x, companion = order.images(step.image), step.x, step.x_companion
        has_companion = companion is not None and companion.shape[1] > 0
        # The prologue runs whole, and what it makes of other bands' tokens is left out.
        if len(pictures) < order.image or step.companion_tokens:
            x = x.new_full((len(x), order.image + step.companion_tokens, x.shape[-1]), math.nan)
            x[:, pictures.slice] = step.x
        if companion is not None and has_companion:
            x[:, order.image :] = companion
        if STRUCTURE not in step.kept:  # once for a conditioning: the host waits for the device to read it
            step.kept[STRUCTURE] = structure_of(step.tensors)
        structure = step.kept[STRUCTURE]
        named = {OPTIONS: {}} | from_tensors(step.tensors, structure)
        if stage.tokens is not None and self.own is not None and self.own.latent is not None:
            companions, ahead, is_alone = step.companion_tokens, self.own.latent.tokens_ahead(named), stage.tokens.alone
            numbers = _numbers(step)
            stage.tokens.band = BandTokens(self.own.latent, order, step.image, numbers, companions, ahead, is_alone)
        if (guidance := stage.guidance()) is not None:
            named[OPTIONS][GUIDED] = Guided(guidance, own_sums if guidance.whole_heads else stage.add_up)
        if (second := named.get(SECOND)) is not None:
            second[ADD_UP] = own_sums if second[WHOLE_HEADS] else stage.add_up
        if residuals := stage.residuals():
            named[CONTROL] = by_kind(residuals)
        timestep = timestep_of(step.timestep, structure)
        if not step.companion_tokens:
            # A naive patch has no row of another one with which the class could fill it up.
            sizes = () if stage.tokens is not None and stage.tokens.alone else structure[LATENT][1:]
            latent = patching.unpack(x, sizes or patching.whole(step.grid))
            out = run_in_form(stage.call, latent, timestep, named)
            return step.x[:, :0] if out is None else patching.pack(out)[:, pictures.slice]
        shapes = [(len(x), *shape) for shape in structure[LATENTS]]
        out = run_in_form(stage.call, pack(patching.unpack_all(x, shapes), len(shapes[0])), timestep, named)
        if out is None:
            return step.x[:, :0]
        tokens = patching.pack_all(tuple(unpack(out, structure[LATENTS])))
        return torch.cat((tokens[:, pictures.slice], tokens[:, order.image if has_companion else tokens.shape[1] :]), dim=1)


def _numbers(step: StepInputs) -> torch.Tensor | None:
    """See BandTokens.numbers."""
    if NUMBERS not in step.kept:
        numbers = class_numbers(step.token_order, step.grid)
        step.kept[NUMBERS] = None if numbers is None else to_device(numbers, step.timestep.device)
    return step.kept[NUMBERS]


def _tensor_plan(own: OwnClass, parameters: Collection[str]) -> dict[str, dict[str, Any]]:
    """Of the layers that a trial has shown, and of one beside the attention whose heads they cut."""
    plan = {f"{block.name}.{cut.layer}": {"": layer_cut(cut)} for block in own.blocks for cut in block.cuts}
    gates = (f"{block.name}.{gate_of(own.kind)}" for block in own.blocks if block.cuts)
    return plan | {gate: {"": COLUMN_BY_HEADS} for gate in gates if f"{gate}.weight" in parameters}


def _values(own: OwnClass, parameters: Collection[str]) -> dict[str, Any]:
    """As Family.native_values: the layer that blocks of this file are without. Other nodes look for it."""
    gate = gate_of(own.kind)
    return {} if not gate or any(name.endswith(f"{gate}.weight") for name in parameters) else {f"*.{gate}": None}


def _companion(own: OwnClass) -> Companion | None:
    if own.latent is None or not own.latent.companion:
        return None
    pattern = own.latent.companion
    axes = len(pattern.partition(" -> ")[0].split()) - 1
    return Companion(pattern, lambda _frames: (1,) * axes)  # nobody knows its usual sizes


@functools.lru_cache(maxsize=8)
def own_class_family(own: OwnClass) -> OwnClassFamily:
    """The family of a class. Imports and builds it, without memory for weights."""
    model = build(own, torch.bfloat16)
    tensors, parameters = model.state_dict(), dict(model.named_parameters())
    names, exact = tuple(tensors), tuple(name for name, each in tensors.items() if each.dtype == torch.float32)
    keys, lists, own_names = dict(own.keys), own.lists(), {name: own_name(own.kind, name) for name in names}
    places = {f"{name}.{key}": (name, number) for name, blocks in lists.items() for number, key in enumerate(blocks)}
    counts = {name: len(blocks) for name, blocks in lists.items()}
    patch = (1, 1, 1) if own.latent is None else own.latent.patch
    widths = [each.shape[-1] for name, each in parameters.items() if each.ndim == 2]

    def no_conditioning(_config: Config, _call: dict[str, Any]) -> dict[str, torch.Tensor]:
        raise AssertionError("calls of an own class name their arguments themselves")

    return OwnClassFamily(
        name=NAME,
        model_class=own.name,
        native_classes=(own.kind,),
        file=FileLayout(
            detect=lambda _shapes: False,
            configure=lambda _shapes: {},
            key_map=lambda _config: {name: Source(keys.get(key, key)) for name, key in own_names.items()},
        ),
        blocks=OwnBlocks(
            lists=(), counts=lambda _config: dict(counts), epilogue=(), whole_states=WHOLE_STATES, places=places, own=own
        ),
        sizes=Sizes(
            latent_channels=lambda _config: 1,
            hidden=lambda _config: max(set(widths), key=widths.count, default=1),
            heads=lambda _config: own.heads,
            head_size=lambda _config: own.head_size,
            sharing=lambda _config: own.sharing,
            head_units=lambda _config: own.head_units,
        ),
        inputs=OwnInputs(
            conditioning=no_conditioning,
            example=lambda _config, text_tokens: {"context": torch.empty(1, text_tokens, 1)},
            words=own.joint,
            options=options_of(own.kind),
        ),
        forward=OwnForward(
            arguments=lambda _step, _config: {},
            exact=exact,
            cached_modules=cached(call=() if own.latent is None else own.latent.shared),
        ),
        tensor_plan=_tensor_plan(own, parameters),
        patching=Patching(side=patch[1], frames=patch[0], video=own.video, companion=_companion(own)),
        half_dtypes=lambda _config: own.halves,
        node_tensors=node_tensors_of(own.kind),
        native_values=lambda _config: _values(own, parameters),
        own=own,
        parameters=frozenset(parameters),
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )
