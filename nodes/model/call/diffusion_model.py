"""The `diffusion_model` of the native MODEL: a stub without weights that hands each call to the ranks."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_patcher
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.enlarged import enlarge
from parallel_backend.checkpoints.reader import node_value
from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.registry import registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.setup import Setup, TensorSizes
from parallel_backend.families.base.patching import Latents, latents_of
from parallel_backend.families.own_class.second_text import LAYERS
from parallel_backend.placement.expected_request import expected_request
from parallel_backend.placement.memory_model import Request

from ...ui.host import check_cancelled
from ...ui.loading_bar import LoadingBar
from ...ui.other_nodes import calling_nodes, named
from ...ui.prompt_graph import present_prompt
from ..controls.controls_here import ControlsHere
from ..lora.head_bank import BANK_KEYS, BANKED, bank_deltas, heads_of, strengths_in_call
from ..lora.lora import PREFIX, NativeWeights
from ..lora.patch_trial import Patch
from ..native.native_call import (
    NATIVE,
    NativeArguments,
    NativeClass,
    by_name,
    leaves_wrappers_to_parent,
    native_class,
    runs_wrappers,
    wrappers_of,
)
from ..native.native_names import NativeNames
from ..patches.attention_choice import preferred_attention
from ..patches.block_patches import block_changes
from ..patches.reach import Unread, refuse_unread, refuse_what_does_not_reach_the_ranks
from ..patches.text_guidance import TextLayers, takes_second_text
from ..run.band import BAND_KEY, Band
from ..run.long_step import LongStep
from ..run.make_room import make_room
from ..run.sampling_run import CallShape, SamplingRun, steps_of
from .call_checks import check_latents, for_entries
from .concurrent_conds import EVALUATION_KEY, Evaluation, tell_if_together

log = logging.getLogger(__name__)

HEEDS_FILES = hasattr(comfy.ldm.modules.attention, "ComfyAttention")
"""ComfyUI takes notice of the attention that a model's file asks for (0.37 and newer)."""


class RemoteDiffusionModel(torch.nn.Module):
    """Answers ComfyUI's model call with the ranks' output. Holds no parameters and no process.

    `weights`: names and shapes of the weights; `native_kind`: name of the class of ComfyUI's supported_models;
    `unet_config`: arguments of the native model's class. `devices`: the devices that the model may use. `setup.devices` are
    those that it does use: with degrees `auto`, AutoDegrees sets `setup` before each run. `patchers_elsewhere`: see
    RemoteModelPatcher.get_nested_additional_models.
    """

    on_ranks = True
    """Tells the model from a native one, as RankMemoryPatcher.on_ranks does."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        setup: Setup,
        devices: tuple[str, ...],
        comm_overlap: bool,
        weights: NativeWeights,
        native_kind: str,
        unet_config: dict[str, Any],
    ):
        super().__init__()
        self.checkpoint, self.setup, self.devices, self.comm_overlap = checkpoint, setup, devices, comm_overlap
        self.weights, self.native_kind, self.unet_config = weights, native_kind, unet_config
        self.run = SamplingRun()
        self.patchers_elsewhere: dict[torch.device, comfy.model_patcher.ModelPatcher] = {}
        self.dtype = weights.dtype
        values = checkpoint.family.native_values(checkpoint.config)
        self.patch_size = values.get("patch_size", checkpoint.family.patching.side)
        if "in_channels" in checkpoint.config:  # RenormCFG reads it
            self.in_channels = checkpoint.config["in_channels"]
        self.current_patcher: comfy.model_patcher.ModelPatcher | None = None
        """Set by ComfyUI's own BaseModel of Qwen-Image 2.1 before a run, and None again after it."""
        self.advised = False
        """Whether faster degrees have been looked for, to tell the user."""
        self._finished = True

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What isinstance sees beside the type: the native model's class, by which nodes tell models apart. Model Sparse
        Attention does, and nodes that go on to change the model's inside, which is refused by their name then."""
        return self.native if self.native_kind in NATIVE else type(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """ValueError if another node replaces one of the native model's layers or functions.

        Private names that the model does not have, such as `_is_torch_compile`, may be set.
        """
        known = name in self.__dict__ or "_finished" not in self.__dict__
        if not known and (not name.startswith("_") or hasattr(type(self), name)):
            _refuse_inside(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in self.__dict__:  # unittest.mock deletes an attribute when __setattr__ has refused it
            _refuse_inside(name)
        super().__delattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteDiffusionModel":
        device_settings = self.setup, self.devices, self.comm_overlap
        return type(self)(self.checkpoint, *device_settings, self.weights, self.native_kind, self.unet_config)

    def enlarged_by(self, patches: Mapping[str, list[Patch]]) -> TensorSizes:
        """Tensors that the patches enlarge, and to which sizes, other than by further output heads."""
        banked = BANK_KEYS if self._has_bank else frozenset()
        return self.weights.sizes_with({key: each for key, each in patches.items() if key not in banked})

    def enlarged(self, sizes: TensorSizes) -> "RemoteDiffusionModel":
        """The model in which a LoRA enlarges these tensors. ValueError if the ranks cannot compute it."""
        larger = enlarge(self.checkpoint.smaller or self.checkpoint, sizes)
        setup, weights = replace(self.setup, enlarged=sizes), self.weights.enlarged(sizes)
        return type(self)(larger, setup, self.devices, self.comm_overlap, weights, self.native_kind, self.unet_config)

    def reset_prefix_cache(self, _enabled: bool) -> None:
        """Called by ComfyUI's own BaseModel of Qwen-Image 2.1 before and after a run, for keys that the native model keeps.
        Ranks drop what they have kept by themselves when the conditioning or the weights change."""

    @functools.cached_property
    def controls_here(self) -> ControlsHere:
        return ControlsHere(self.checkpoint, lambda: self.native, self.unet_config, self.dtype)

    @functools.cached_property
    def native(self) -> NativeClass:
        """The native model's class."""
        return native_class(self.native_kind)

    def __getattr__(self, name: str) -> Any:
        """The native model's values and shapes of layers, such as `img_in.weight.shape`, which ComfyUI's BaseModels read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "checkpoint":  # before __init__ has set it
                raise
            family, tensors = self.checkpoint.family, self.weights.original
            if name in family.node_tensors:
                return node_value(self.checkpoint, name, self.dtype)
            found = NativeNames(self.checkpoint, tensors, "").at(name)
            is_text = name == LAYERS and takes_second_text(family)
            return TextLayers(self.checkpoint, tensors, f"{LAYERS}.") if is_text else found

    def state_dict(self, *_args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Names and shapes of the weights, which are on the ranks. ComfyUI matches a LoRA's keys with them."""
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in self.weights.tensors.items()})
        return destination

    def transformer(self, expected: Callable[[], Request | None]) -> RemoteTransformer:
        """The model on its ranks, patched. At first use the ranks are started and loaded, for a run like `expected()`."""

        def adapted(model: RemoteTransformer) -> RemoteTransformer:
            model.adapt(self._patches_name(), self._deltas(), check_cancelled, self._strengths())
            return model

        return self.run.tried(lambda: self._loaded(expected), adapted)

    def _loaded(self, expected: Callable[[], Request | None]) -> RemoteTransformer:
        """As `transformer`, with the patches of any earlier run."""
        given = self.run.patcher(), make_room, expected, self.checkpoint
        model = registry().model(self.setup, check_cancelled, LoadingBar(), *given)
        self._take(model.checkpoint)
        self.run.answers(model)
        return model

    def follow_files(self) -> None:
        """At the first use in a prompt: take the model's files as they are now, as ranks do. See PromptFiles."""
        self._take(registry().checkpoint(present_prompt(), self.setup, self.checkpoint))

    def _take(self, checkpoint: Checkpoint) -> None:
        if checkpoint.file_state != self.checkpoint.file_state:
            self.checkpoint = checkpoint
            self.weights.read_from(checkpoint)
            for made in ("_methods", "controls_here", "whole_bytes"):
                vars(self).pop(made, None)

    def _patches_name(self) -> tuple[Any, ...] | None:
        """Stands for all patches of the run. None: it has none."""
        run = self.run
        is_patched = run.patches or run.bypass_patches or run.hook_patches
        return (run.patches_uuid, *run.hook_patches) if is_patched else None

    def _deltas(self) -> Iterator[Delta]:
        """All changes of weights for the ranks. Group 0 always applies. Each further group is one hook, whose strength
        may change from call to call."""
        of_nodes = {PREFIX + key for key in self.checkpoint.node_keys}
        groups = enumerate(self.run.hook_patches.values(), 1)
        heads = self.heads_of(self.run.patches)
        left_out = of_nodes if heads == 1 else of_nodes | BANK_KEYS
        elsewhere = self.checkpoint.family.is_elsewhere
        for group, patches in ((0, self.run.patches), (0, self.run.bypass_patches), *groups):
            of_ranks = (key for key in patches if key not in left_out and not elsewhere(key.removeprefix(PREFIX)))
            yield from self.weights.deltas({key: patches[key] for key in of_ranks}, group)
        if heads > 1:
            yield from bank_deltas(self.weights, self.run.patches, heads, 1 + len(self.run.hook_patches))

    def heads_of(self, patches: Mapping[str, list[Patch]]) -> int:
        """Output heads of a PDD acceleration LoRA among the patches. 1: there is none."""
        return heads_of(self.weights, patches) if self._has_bank else 1

    def _choose_heads(self, timestep: torch.Tensor, options: Mapping[str, Any]) -> None:
        """For a model call at `timestep`, if the run's patches have a bank of heads."""
        if (heads := self.heads_of(self.run.patches)) > 1:
            self.run.head_strengths = strengths_in_call(heads, timestep, options)

    @property
    def _has_bank(self) -> bool:
        return BANKED in self.checkpoint.family.native_classes

    def _strengths(self) -> tuple[float, ...]:
        """Strengths of the hooks in the present model call, in the order of `hook_patches`.

        ComfyUI only joins conditionings with the same hooks to a call, so one strength holds for all its entries.
        """
        patcher = self.run.patcher()
        hooks = None if patcher is None else patcher.current_hooks
        strengths = {} if hooks is None else {hook.hook_ref: hook.strength for hook in hooks.hooks}
        of_hooks = (float(strengths.get(reference, 0.0)) for reference in self.run.hook_patches)
        return (*of_hooks, *self.run.head_strengths)

    @functools.cached_property
    def whole_bytes(self) -> int:
        """Bytes of all weights in the dtype in which ranks store them."""
        return sum(self.checkpoint.nbytes(target, self.setup.dtype) for target in self.checkpoint.key_map)

    @torch.compiler.disable  # a node may compile the caller, and sending to ranks cannot be traced
    def forward(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        timestep: torch.Tensor | Sequence[torch.Tensor],
        context: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **extra: Any,
    ) -> torch.Tensor | list[torch.Tensor]:
        """ComfyUI's diffusion_model call: latent x [B, C, (T,) H, W], timestep [B] or [B, T] -> the model's output.

        Nested latents are lists, the video's latent first, as input and output. A list of timesteps is joined along the
        second axis: [B, k + l]. Other nodes' wrappers are run if the native model runs them.
        """
        options = transformer_options or {}
        arguments = {"context": context, "control": control, "transformer_options": options, **extra}
        if self.wrappers(options):
            return self.native.forward(self, x, timestep, **arguments)
        if leaves_wrappers_to_parent(self.native):
            refuse_unread(Unread("a wrapper around the diffusion model", each) for each in wrappers_of(options))
        return self._call(x, timestep, **arguments)

    def wrappers(self, options: dict[str, Any], is_model_options: bool = False) -> list[Any]:
        """Other nodes' wrappers around a call with these transformer_options, or with those inside model_options."""
        return wrappers_of(options, is_model_options) if runs_wrappers(self.native) else []

    def _forward(self, *arguments: Any, **named: Any) -> torch.Tensor | list[torch.Tensor]:
        """The call inside wrappers, with the arguments of the native class's `_forward`.

        The native `forward` has already done to the latents what it does around its `_forward`.
        """
        return self._call(**by_name(self.native, arguments, named), is_carried=False)

    def _band_of(self, latents: Latents, options: dict[str, Any]) -> Band | None:
        """The band that this call computes. None: it is a call for the whole latent."""
        band: Band | None = options.get(BAND_KEY)
        return band if band is not None and band.takes(self, latents, options) else None

    def forward_orig(self, *_arguments: Any, **_named: Any) -> None:
        """ValueError: nodes call or replace it to reach the inside of the native model."""
        _refuse_inside("forward_orig")

    def _call(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        timestep: torch.Tensor | Sequence[torch.Tensor],
        context: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        is_carried: bool = True,
        **extra: Any,
    ) -> torch.Tensor | list[torch.Tensor]:
        """As `forward`, without wrappers. `is_carried`: latents are as `forward` gets them, and not as `_forward` does."""
        options = transformer_options or {}
        family, config = self.checkpoint.family, self.checkpoint.config
        inputs = {name: value for name, value in extra.items() if value is not None}
        asked_timestep, others = timestep, {"context": context, **inputs}
        latents = (x,) if isinstance(x, torch.Tensor) else tuple(x)
        band = self._band_of(latents, options)
        attention = self.setup.attention
        preferred = preferred_attention(self.checkpoint, attention, options) if HEEDS_FILES else ""
        changes, patches = block_changes(family, config, options, len(latents[0]), attention, preferred)
        unknown = [name for name in inputs if name not in family.inputs.accepts]
        refuse_what_does_not_reach_the_ranks(options | patches, unknown, family)
        check_latents(family, config, latents)
        if not isinstance(timestep, torch.Tensor):
            timestep = torch.cat([each.reshape(len(each), -1) for each in timestep], dim=1)
        run_cache = self.run.cache
        if band is None and run_cache is not None:
            run_cache.see(latents, options)
        allowed = run_cache is not None and run_cache.may_forecast(options)
        inputs |= self._sizes(latents, band) | {"context": context, "latent": tuple(latents[0].shape)}
        tensors = family.inputs.conditioning(config, inputs)
        timestep = for_entries(timestep, tensors, len(latents[0]))
        native_arguments = NativeArguments(latents, asked_timestep, others, options)
        block_residuals = self.controls_here.residuals(native_arguments, control, tensors, self.run)
        evaluation: Evaluation = options.get(EVALUATION_KEY) or Evaluation([])
        self._choose_heads(timestep, options)
        call = ModelCall(
            x=latents,
            timestep=timestep,
            tensors=tensors,
            residuals=block_residuals,
            changes=changes,
            first_replica=evaluation.first_replica(len(latents[0])),
            may_forecast=allowed,
        )
        if changes.together:
            tell_if_together(self)
        if band is None:
            shape = CallShape(tuple(latents[0].shape), 1 if context is None else context.shape[1])
            outputs = self._predict(call, shape, steps_of(options), evaluation)
        else:
            exact = float(options["sigmas"].max()) > band.exact_above
            outputs = band.run.predict(band.index, call, exact, band.poll, evaluation.start_next)
        return latents_of(outputs)[0]

    def _predict(self, call: ModelCall, shape: CallShape, steps: int, evaluation: Evaluation) -> torch.Tensor | Latents:
        """The ranks' output for a call with the whole latent, of a sampler with `steps` steps."""
        batch = shape.latent[0]
        expected = functools.partial(expected_request, self.checkpoint, shape.latent, batch, shape.text_tokens)

        def predict(model: RemoteTransformer) -> torch.Tensor | Latents:
            cache = None if self.run.cache is None else self.run.cache.for_calls
            poll = LongStep(model, first=not self.run.calls)
            with self.run.counted(shape, steps):
                return model.predict(call, poll, self.comm_overlap, cache, evaluation.start_next)

        return self.run.tried(lambda: self.transformer(expected), predict)

    def _sizes(self, latents: Latents, band: Band | None) -> dict[str, Any]:
        """Sizes of the whole latent that `Inputs.conditioning` needs, the same in every band."""
        if band is not None:
            return {"grid": band.run.layout.grid, "companion_tokens": band.run.layout.companion_tokens}
        patching, shapes = self.checkpoint.family.patching, [tuple(latent.shape) for latent in latents]
        return {"grid": patching.grid(shapes[0]), "companion_tokens": patching.companion_tokens(shapes)}


def _refuse_inside(name: str) -> None:
    refuse_unread([Unread(f"another '{name}' in ComfyUI's model", by=named(calling_nodes()))])


def remote_stub(model: comfy.model_patcher.ModelPatcher) -> RemoteDiffusionModel:
    """The RemoteDiffusionModel inside a MODEL. ValueError if the MODEL is a native one."""
    stub = getattr(getattr(model, "model", None), "diffusion_model", None)
    if not isinstance(stub, RemoteDiffusionModel):
        raise ValueError(
            "model: this MODEL runs in ComfyUI itself. Load it with Parallel DiT Loader, or put Parallelize Model before "
            "this node."
        )
    return stub
