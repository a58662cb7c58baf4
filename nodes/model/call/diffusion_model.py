"""The `diffusion_model` of the native MODEL: a stub without weights that hands each call to the ranks."""

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import comfy.model_patcher
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_setup
from parallel_backend.client.call import ModelCall, StartNext
from parallel_backend.client.lora import Delta
from parallel_backend.client.registry import registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Setup, TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.own_class.adapters.adapters import Adapter, adapter_of
from parallel_backend.own_class.built.building import build, class_of
from parallel_backend.own_class.calls.patching import Latents
from parallel_backend.own_class.cuts.guided_attention import LAYERS
from parallel_backend.placement.expected_request import expected_request
from parallel_backend.placement.memory_model import Request

from ...ui.host import check_cancelled
from ...ui.loading_bar import LoadingBar
from ...ui.other_nodes import calling_nodes, named
from ...ui.prompt_graph import present_prompt
from ..controls.controls_here import ControlsHere
from ..loading.model_file import importing, open_file
from ..lora.head_bank import BANK_KEYS, BANKED, bank_deltas, heads_of
from ..lora.lora import PREFIX, NativeWeights
from ..lora.patch_trial import Patch
from ..native.native_call import (
    NativeClass,
    by_name,
    leaves_wrappers_to_parent,
    runs_wrappers,
    wrappers_of,
)
from ..native.native_names import NativeNames
from ..patches.reach import Unread, refuse_unread
from ..patches.text_guidance import TextLayers
from ..run.band import BAND_KEY, Band
from ..run.kept_run import kept
from ..run.long_step import long_step
from ..run.make_room import make_room
from ..run.sampling_run import CallShape, SamplingRun
from .answered_call import answered
from .own_methods import TEXT_METHOD, OwnMethods
from .prepared_call import PROVE_KEY
from .proofs import Proofs


class RemoteDiffusionModel(torch.nn.Module):
    """Answers ComfyUI's model call with the ranks' output. Has no parameters and no process.

    Before a call whose structure is new is sent to the ranks, a trial proves that ranks can run it (proofs.py). `weights`:
    names and shapes of the weights. `devices`: the devices that the model may use. `setup.devices` are those that it does
    use: with degrees `auto`, AutoDegrees sets `setup` before each run. `patchers_elsewhere`: see
    RemoteModelPatcher.get_nested_additional_models.
    """

    on_ranks = True
    """Distinguishes the model from a native one, as RankMemoryPatcher.on_ranks does."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        setup: Setup,
        devices: tuple[str, ...],
        comm_overlap: bool,
        weights: NativeWeights,
    ):
        super().__init__()
        self.checkpoint, self.setup, self.devices, self.comm_overlap = checkpoint, setup, devices, comm_overlap
        self.weights, self.run = weights, SamplingRun()
        self.patchers_elsewhere: dict[torch.device, comfy.model_patcher.ModelPatcher] = {}
        self.dtype = weights.dtype
        self.current_patcher: comfy.model_patcher.ModelPatcher | None = None
        """Set by ComfyUI's own BaseModel of Qwen-Image 2.1 before a run, and set to None after it."""
        self.advised = False
        """Whether faster degrees have been searched for, to tell the user."""
        self._prompt: str | None = None  # the last one in which the model was used
        self._finished = True

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The native model's class, which isinstance accepts in addition to the type: nodes distinguish models by it. Model
        Sparse Attention does. So do nodes that then change the inside of the model; those are refused by name."""
        return self.native

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises ValueError if another node replaces one of the native model's layers or functions.
        Private names that the model does not have, such as `_is_torch_compile`, may be set."""
        known = name in self.__dict__ or "_finished" not in self.__dict__
        if not known and (not name.startswith("_") or hasattr(type(self), name)):
            _refuse_inside(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in self.__dict__:  # unittest.mock deletes an attribute when __setattr__ has refused it
            _refuse_inside(name)
        super().__delattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteDiffusionModel":
        return type(self)(self.checkpoint, self.setup, self.devices, self.comm_overlap, self.weights)

    def enlarged_by(self, patches: Mapping[str, list[Patch]]) -> TensorSizes:
        """Return the tensors that the patches enlarge, with their new sizes. Additional output heads do not count."""
        banked = BANK_KEYS if self._has_bank else frozenset()
        return self.weights.sizes_with({key: each for key, each in patches.items() if key not in banked})

    def enlarged(self, sizes: TensorSizes) -> "RemoteDiffusionModel":
        """Return a copy of this model in which a LoRA enlarges the tensors `sizes`. ComfyUI's detection finds its class.
        Raises ValueError if ranks cannot run the enlarged model."""
        try:
            file = open_file(self.setup.path, importing(self.devices[0]), sizes)
        except ValueError:
            named = ", ".join(f"{short(key)} to {list(shape)}" for key, shape in sizes)
            raise ValueError(
                f"model: a LoRA that enlarges {named} cannot run on ranks: ComfyUI has no class {self.own.name} of that "
                "size. Use a LoRA that was made for the model."
            ) from None
        setup, weights = replace(self.setup, own_class=file.own, enlarged=sizes), self.weights.enlarged(sizes)
        return type(self)(file.checkpoint, setup, self.devices, self.comm_overlap, weights)

    @property
    def own(self) -> OwnClass:
        """ComfyUI's class of the model, with the proofs of all trials so far."""
        return self.setup.own_class

    @functools.cached_property
    def adapter(self) -> Adapter:
        """The adapter of the model's class."""
        return adapter_of(self.own.kind)

    @functools.cached_property
    def meta(self) -> torch.nn.Module:
        """The model on the meta device."""
        return build(self.own)

    @functools.cached_property
    def _methods(self) -> OwnMethods:
        return OwnMethods(self.checkpoint, self.dtype)

    @functools.cached_property
    def proofs(self) -> Proofs:
        """Proofs of the model's calls."""
        return Proofs()

    def reset_prefix_cache(self, _enabled: bool) -> None:
        """Does nothing. ComfyUI's own BaseModel of Qwen-Image 2.1 calls it before and after a run, for keys that the native
        model keeps. Ranks drop their stored keys themselves when the conditioning or the weights change."""

    @functools.cached_property
    def controls_here(self) -> ControlsHere:
        return ControlsHere(self.checkpoint, self.weights)

    @functools.cached_property
    def native(self) -> NativeClass:
        """The native model's class."""
        return class_of(self.own)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the native model that ComfyUI's BaseModels and nodes read: shapes of layers, such as
        `img_in.weight.shape`, and plain values, such as patch sizes and SeedVR2's texts. Raises ValueError for functions
        that ComfyUI would call before the model; `hasattr` must find them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_finished" not in vars(self):  # __init__ is at work
                raise
        if name in self.weights.tensors:  # of the model itself, and of no layer
            return self.weights.value(name).to(self.dtype)
        given = self.checkpoint, self.weights.tensors, self.weights.keys
        try:
            found = NativeNames(*given).at(name)
            return TextLayers(*given, f"{LAYERS}.") if name == LAYERS else found
        except AttributeError:
            if name.startswith("_") or not hasattr(self.meta, name):
                raise
        if name == TEXT_METHOD:
            return functools.partial(self.computed, TEXT_METHOD)
        value = getattr(self.meta, name)
        if isinstance(value, torch.nn.Module | torch.Tensor) or inspect.ismethod(value):
            raise ValueError(
                f"model_name: {self.checkpoint.path.name} cannot run on ranks: ComfyUI itself computes with its "
                f"'{name}'. Load it with ComfyUI's own loader, on one GPU."
            )
        return value

    def computed(self, method: str, *arguments: Any, **named: Any) -> torch.Tensor:
        """OwnMethods.computed with the run's LoRAs."""
        patches, bypass_patches = self.run.patches, self.run.bypass_patches
        both = {key: patches.get(key, []) + bypass_patches.get(key, []) for key in (*patches, *bypass_patches)}
        return self._methods.computed(method, both, self.run.patches_uuid, *arguments, **named)

    def state_dict(self, *_args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the names and shapes of the weights, which are on the ranks. ComfyUI matches a LoRA's keys with them."""
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in self.weights.tensors.items()})
        return destination

    def transformer(self, expected: Callable[[], Request | None]) -> RemoteTransformer:
        """Return the model on its ranks, with its patches. At first use the ranks are started and loaded, for a run like
        `expected()`."""
        return kept(self, lambda: self._loaded(expected), self._adapted)

    def _loaded(self, expected: Callable[[], Request | None]) -> RemoteTransformer:
        """Return the model on its ranks. Its weights may still have the patches of an earlier run."""
        known = self.run.loaded()
        if known is not None and self.run.of_setup is self.setup and registry().models.use_again(known):
            return known
        given = self.run.patcher(), make_room, expected, self.checkpoint
        model = registry().model(self.setup, check_cancelled, LoadingBar(), *given)
        self.run.answers(model, self.setup, long_step(model, first=not self.run.calls))
        return model

    def _adapted(self, model: RemoteTransformer) -> RemoteTransformer:
        """Return the model with the run's patches at the strengths of the present call."""
        model.adapt(self.run.patches_name, self._deltas(), check_cancelled, self._strengths())
        return model

    def follow_files(self) -> None:
        """At the first use in a prompt, take the model's file as it is now. If it changes later, that changes none of the
        prompt's results. Raises ValueError for a file that cannot be opened as this class."""
        prompt = present_prompt()
        if prompt is not None and prompt == self._prompt:
            return
        self._prompt = prompt
        if self.checkpoint.has_changed:
            self.checkpoint = replace(open_setup(self.setup), built=self.checkpoint.built)
            self.weights.read_from(self.checkpoint)
            for made in ("_methods", "controls_here", "whole_bytes"):
                vars(self).pop(made, None)

    def _deltas(self) -> Iterator[Delta]:
        """All changes of weights for the ranks. Group 0 always applies. Each other group is one hook, whose strength may
        change from call to call."""
        groups = enumerate(self.run.hook_patches.values(), 1)
        heads = self.heads_of(self.run.patches)
        left_out = frozenset() if heads == 1 else BANK_KEYS
        elsewhere = self.checkpoint.built.is_elsewhere
        for group, patches in ((0, self.run.patches), (0, self.run.bypass_patches), *groups):
            of_ranks = (key for key in patches if key not in left_out and not elsewhere(key.removeprefix(PREFIX)))
            yield from self.weights.deltas({key: patches[key] for key in of_ranks}, group)
        if heads > 1:
            yield from bank_deltas(self.weights, self.run.patches, heads, 1 + len(self.run.hook_patches))

    def heads_of(self, patches: Mapping[str, list[Patch]]) -> int:
        """Return the number of output heads of a PDD acceleration LoRA in the patches. 1: there is no such LoRA."""
        return heads_of(self.weights, patches) if self._has_bank else 1

    @property
    def _has_bank(self) -> bool:
        return self.own.kind == BANKED

    def _strengths(self) -> tuple[float, ...]:
        """Return the strengths of the hooks in the present model call, in the order of `hook_patches`. ComfyUI only joins
        conditionings with the same hooks to a call, so one strength holds for all its entries."""
        if not self.run.hook_patches:
            return self.run.head_strengths
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

        Nested latents are lists, as input and output, with the video's latent first. A list of timesteps is joined along the
        second axis: [B, k + l]. Other nodes' wrappers run if the native model runs them.
        """
        options = transformer_options or {}
        self.run.call = time.perf_counter(), options
        if wrappers := wrappers_of(options):
            if runs_wrappers(self.native):
                arguments = {"context": context, "control": control, "transformer_options": options, **extra}
                return self.native.forward(self, x, timestep, **arguments)
            if leaves_wrappers_to_parent(self.native):
                refuse_unread(Unread("a wrapper around the diffusion model", each) for each in wrappers)
        return answered(self, x, timestep, context, control, options, **extra)

    def wrappers(self, options: dict[str, Any], is_model_options: bool = False) -> list[Any]:
        """Return other nodes' wrappers around a call with these transformer_options, or with those inside model_options."""
        return wrappers_of(options, is_model_options) if runs_wrappers(self.native) else []

    def _forward(self, *arguments: Any, **named: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return the call inside of wrappers, with the arguments of the native class's `_forward`. The native `forward` has
        already changed the latents, as it does before its `_forward`."""
        return answered(self, **by_name(self.native, arguments, named), is_carried=False)

    def band_of(self, latents: Latents, options: dict[str, Any]) -> Band | None:
        """Return the band that this call computes. None: the call is for the whole latent."""
        band: Band | None = options.get(BAND_KEY)
        return band if band is not None and band.takes(self, latents, options) else None

    def forward_orig(self, *_arguments: Any, **_named: Any) -> None:
        """Always raises ValueError: nodes call or replace it to reach the inside of the native model."""
        _refuse_inside("forward_orig")

    def predict(self, call: ModelCall, shape: CallShape, steps: int, start_next: StartNext) -> torch.Tensor | Latents:
        """Return the ranks' output for a call with the whole latent, from a sampler with `steps` steps."""

        def expected() -> Request | None:
            return expected_request(self.checkpoint, shape.latent, shape.latent[0], shape.text_tokens)

        def work(model: RemoteTransformer) -> torch.Tensor | Latents:
            self._adapted(model)
            check_cancelled()  # a call may be answered before the first poll
            cache = None if self.run.cache is None else self.run.cache.for_calls
            with self.run.counted(shape, steps):
                return model.predict(call, self.run.poll, self.comm_overlap, cache, start_next)

        return kept(self, lambda: self._loaded(expected), work)

    def prove(self, run: Callable[[dict[str, Any]], Any], channels: Sequence[int], bands: bool = True) -> str:
        """Have the class tried for a run before its model is loaded. Returns why `bands` are not proven. Empty: they are.

        `run` makes a step's model calls with these entries added to transformer_options; the calls return zeros. `channels`:
        of each of the sampler's latents.
        """
        self.run.whole_calls, self.run.unproven_bands = {} if bands else None, ""
        self.run.prepared.clear()  # another trial may be needed
        run({PROVE_KEY: channels})
        return self.run.unproven_bands

    def without_bands(self, reason: str) -> str:
        """Return the error text if the user asked for bands and they are not possible."""
        name = self.checkpoint.path.name
        if (degrees := self.setup.degrees).patch > 1:
            return f"Set patch_degree to 1: {name} cannot run in {degrees.patch_mode} patches: {reason}."
        return f"model: {name} cannot run in PipeFusion's patches: {reason}. Remove Apply PipeFusion to run it in stages."


def _refuse_inside(name: str) -> None:
    refuse_unread([Unread(f"another '{name}' in ComfyUI's model", by=named(calling_nodes()))])


def remote_stub(model: comfy.model_patcher.ModelPatcher) -> RemoteDiffusionModel:
    """Return the RemoteDiffusionModel inside a MODEL. Raises ValueError if the MODEL is a native one."""
    stub = getattr(getattr(model, "model", None), "diffusion_model", None)
    if not isinstance(stub, RemoteDiffusionModel):
        raise ValueError(
            "model: this MODEL runs in ComfyUI itself. Load it with Parallel DiT Loader, or put Parallelize Model before "
            "this node."
        )
    return stub
