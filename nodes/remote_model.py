"""A native MODEL without weights: ComfyUI's own BaseModel for the family, its diffusion_model a stub that asks the ranks."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn
from uuid import UUID

import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import torch
from comfy_execution.utils import get_executing_context

from parallel_backend.bands import BandedRun
from parallel_backend.checkpoint import Checkpoint
from parallel_backend.client import RemoteTransformer
from parallel_backend.device_names import device_kind
from parallel_backend.dtypes import compute_dtype
from parallel_backend.pool import Poll
from parallel_backend.registry import ModelKey, registry
from parallel_backend.weights import original_values

from .controlnet import residuals
from .loading_bar import LoadingBar
from .lora import NativeWeights, Patch
from .side_by_side import EVALUATION_KEY, Evaluation, add_side_by_side
from .step_cache import SamplingCache, begin_cache

HARMLESS = ("crossattn_controlnet",)
"""Arguments of a model call that native models do not look at."""

BAND_KEY = "parallel_dit_band"
"""Key in `transformer_options` under which a band's model calls carry a `Band`."""


ALL = 1e32
"""Bytes without a limit, as ComfyUI writes it."""


def check_cancelled() -> None:
    """Raises ComfyUI's InterruptProcessingException once the user has pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


class Band:
    """Marks a model call as band `index` of `run`. Calls at sigmas above `exact_above` are exact.

    `poll` runs while a call is waited for: the look at Cancel, where the call is made on ComfyUI's own thread.
    """

    def __init__(self, run: BandedRun, index: int, exact_above: float, poll: Poll | None = None):
        self.run, self.index, self.exact_above, self.poll = run, index, exact_above, poll

    def __deepcopy__(self, memo: dict[int, Any]) -> "Band":
        return self  # ComfyUI copies transformer_options; the run is one


class NativeNames:
    """Attributes as a native module would have them, down to its tensors, which have a shape and no values."""

    def __init__(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], prefix: str):
        self._checkpoint, self._tensors, self._prefix = checkpoint, tensors, prefix

    def at(self, name: str) -> Any:
        """AttributeError if the native model has nothing of that name."""
        whole = self._prefix + name
        if whole in self._tensors:
            return self._tensors[whole]
        if any(key.startswith(f"{whole}.") for key in self._tensors):
            return NativeNames(self._checkpoint, self._tensors, f"{whole}.")
        raise AttributeError(
            f"model: '{whole}' of the native model is not possible with Parallel DiT's weights, which are on its ranks. "
            "Remove the node that asks for it (some ControlNets do), or load the model with a native loader."
        )

    __getattr__ = at

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The checkpoint's own values: ControlNets for SD3.5 begin with a copy of the model's first layer."""
        return original_values(self._checkpoint, self._prefix)

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse("computing with its layers (some ControlNets do)", "Use another ControlNet, or a native loader.")

    def __getitem__(self, index: int) -> NoReturn:
        refuse("looking into its blocks (a LoRA in bypass mode does)", "Use a plain LoRA loader.")


class RemoteDiffusionModel(torch.nn.Module):
    """Takes ComfyUI's model call and answers with what the ranks say. Holds no parameters and no process.

    `patches`, `patches_uuid`, `cache`: those of `patcher`, the one under which it is sampled; its clones all share this
    module. `idle`: what was said in this sampling run about replicas that have nothing to do. `devices`: those that it may
    use. `key` has the ones that it does use; degrees `auto` set it before a run.
    """

    weights: NativeWeights  # set by make_model

    def __init__(self, checkpoint: Checkpoint, key: ModelKey, comm_overlap: bool):
        super().__init__()
        self.checkpoint, self.key, self.comm_overlap = checkpoint, key, comm_overlap
        self.devices = key.devices
        self.patches: dict[str, list[Patch]] = {}
        self.patches_uuid: UUID | None = None
        self.cache: SamplingCache | None = None
        self.patcher: Callable[[], RemoteModelPatcher | None] = lambda: None
        self.idle: str | None = None
        self.dtype = compute_dtype(key.dtype, torch.device(device_kind(key.devices[0])))
        self.patch_size = checkpoint.family.patching.side

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteDiffusionModel":
        copy = RemoteDiffusionModel(self.checkpoint, self.key, self.comm_overlap)
        copy.devices = self.devices
        copy.weights = self.weights
        return copy

    @functools.cached_property
    def native_tensors(self) -> dict[str, torch.Tensor]:
        """The family's native parameter names -> tensors on the meta device, which have a shape and no values."""
        return {name: torch.empty(shape, device="meta") for name, shape in self.checkpoint.original_shapes.items()}

    def __getattr__(self, name: str) -> Any:
        """ComfyUI's BaseModels read their native model's values, and shapes of its layers, such as `img_in.weight.shape`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "checkpoint":  # not set yet
                raise
            values = self.checkpoint.family.native_values(self.checkpoint.config)
            return values[name] if name in values else NativeNames(self.checkpoint, self.native_tensors, "").at(name)

    def state_dict(self, *_args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Names and shapes of the weights, which are elsewhere: what ComfyUI matches a LoRA's keys with."""
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in self.weights.tensors.items()})
        return destination

    def transformer(self) -> RemoteTransformer:
        """The model on its ranks, patched; starts and loads them at first use."""
        model = registry().model(self.key, check_cancelled, LoadingBar(), self.patcher())
        name = self.patches_uuid if self.patches else None
        model.adapt(name, self.weights.deltas(self.patches), check_cancelled)
        return model

    def bytes_on(self, device: torch.device) -> int:
        """What the ranks on this device hold now."""
        return registry().bytes_on(self.key, str(device))

    def share_of(self, device: torch.device) -> int:
        """Bytes that the ranks on this device are going to take if all ranks take the same; stage_split may differ."""
        degrees, ranks = self.key.degrees, self.key.devices.count(str(device))
        return ranks * self.whole_bytes // (degrees.pipe * degrees.tensor)

    @functools.cached_property
    def whole_bytes(self) -> int:
        """Of all weights, as they are on a rank."""
        return sum(self.checkpoint.nbytes(target, self.key.dtype) for target in self.checkpoint.recipe)

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        """ComfyUI's diffusion_model call: latent x [B, C, (T,) H, W], timestep [B] or [B, T] -> the model's output."""
        options = transformer_options or {}
        family, config = self.checkpoint.family, self.checkpoint.config
        given = {name: value for name, value in extra.items() if value is not None}
        refuse_what_does_not_reach_the_ranks(options, [name for name in given if name not in family.accepts])
        axes = 5 if family.patching.video else 4
        if x.ndim != axes or 0 in x.shape:
            raise ValueError(
                f"latent_image: a latent of the shape {list(x.shape)} cannot be sampled by this model, which takes {axes} "
                "axes, none of them empty. Use the Empty Latent node made for this model."
            )
        if x.shape[1] != family.latent_channels(config):
            raise ValueError(
                f"latent_image: the latent has {x.shape[1]} channels, this model needs {family.latent_channels(config)}. "
                "Use the Empty Latent node made for this model, or a latent encoded with its own VAE."
            )
        tensors = family.conditioning(config, {"context": context, **given})
        added = residuals(family, config, control, tuple(x.shape))
        evaluation: Evaluation = options.get(EVALUATION_KEY) or Evaluation([])
        turn = {"home": evaluation.home(len(x)), "meanwhile": evaluation.go_on}
        band: Band | None = options.get(BAND_KEY)
        allowed = self.cache is not None and self.cache.may_forecast(options)
        if band is None:
            cache = None if self.cache is None else self.cache.cache
            model, overlap = self.transformer(), self.comm_overlap
            return model.predict(x, timestep, tensors, check_cancelled, overlap, added, cache, allowed, **turn)
        exact = float(options["sigmas"].max()) > band.exact_above
        return band.run.predict(band.index, x, timestep, tensors, exact, band.poll, added, allowed, **turn)


def refuse_what_does_not_reach_the_ranks(options: dict[str, Any], unknown: list[str]) -> None:
    """ValueError for anything that changes the native model's inside: ignored silently, the picture would be wrong."""
    found = []
    found += [f"model patch '{name}'" for name, patches in options.get("patches", {}).items() if patches]
    found += [f"attention replacement '{name}'" for name, by in options.get("patches_replace", {}).items() if by]
    kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
    if comfy.patcher_extension.get_all_wrappers(kind, options):
        found.append("a wrapper around the diffusion model")
    found += [f"'{name}' conditioning" for name in unknown if name not in HARMLESS]
    if found:
        raise ValueError(
            f"model: {', '.join(found)} cannot be forwarded to Parallel DiT's ranks in this version. Remove the node "
            "that adds it, or load the model with a native loader."
        )


class RemoteModelPatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher whose weights are elsewhere. Says no where native patches would be lost."""

    def __init__(self, model, load_device, *arguments, **named):
        self.load_device = load_device  # ComfyUI 0.3.64 asks for `model_size` before it sets this
        super().__init__(model, load_device, *arguments, **named)

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        """ComfyUI's own, which keeps the patches. ValueError for a kind that the ranks cannot add to their weights."""
        names = self.model.state_dict()
        for target, value in patches.items():
            key, offset, function = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
            if key in names:  # or it is the text encoder's: a LoRA's patches come all together
                self.model.diffusion_model.weights.check(key, (strength_patch, value, strength_model, offset, function))
        return super().add_patches(patches, strength_patch, strength_model)

    def pre_run(self):
        """A sampling run begins: the ranks are to have this patcher's patches, not those of another clone."""
        super().pre_run()
        stub = self.model.diffusion_model
        stub.patches, stub.patches_uuid, stub.patcher = self.patches, self.patches_uuid, weakref.ref(self)
        stub.idle = None
        stub.cache = begin_cache(self)
        if (model := registry().present()) is not None:  # or it begins when it is loaded
            model.begin_timeline()

    def cleanup(self):
        """A sampling run has ended: what was kept of its calls goes."""
        stub = self.model.diffusion_model
        cache, stub.cache = stub.cache, None
        super().cleanup()
        if cache is not None:
            cache.tell()

    def model_size(self):
        """Bytes in this process, and of ranks on the GPU that ComfyUI uses; before they are loaded, what they will take."""
        return self._own_bytes() + (self._rank_bytes() or self._expected_bytes())

    def loaded_size(self):
        return (self._own_bytes() if self.model.model_loaded_weight_memory else 0) + self._rank_bytes()

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """ComfyUI's own, always in full: this process has little of the model, and the ranks load at the first call."""
        return super().partially_load(device_to, ALL, force_patch_weights)

    def partially_unload(self, device_to, memory_to_free=0, *arguments, **named):
        """Frees nothing, whereupon ComfyUI unloads the whole: ranks hold all of their weights or none."""
        return 0

    def detach(self, unpatch_all=True):
        """ComfyUI's own. With `unpatch_all` the model is unloaded, without it only another clone takes this one's place.

        The ranks then free their memory, except where a node needs room on a GPU that has none of them.
        """
        if unpatch_all and (self._on_cpu() or self._rank_bytes() or get_executing_context() is None):
            registry().unload(self.model.diffusion_model.key)
        return super().detach(unpatch_all)

    def _on_cpu(self) -> bool:
        return comfy.model_management.is_device_cpu(self.load_device)

    def _own_bytes(self) -> int:
        """`state_dict` lists weights that are not in this process."""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))

    def _rank_bytes(self) -> int:
        """Nothing on a CPU, whose memory ComfyUI does not manage."""
        return 0 if self._on_cpu() else self.model.diffusion_model.bytes_on(self.load_device)

    def _expected_bytes(self) -> int:
        return 0 if self._on_cpu() else self.model.diffusion_model.share_of(self.load_device)

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        refuse("a LoRA in the conditioning (a hook, scheduled or not)", "Use a LoRA loader on the MODEL.")

    def add_weight_wrapper(self, name, function):
        refuse(f"a wrapper around the weight {name}", "Remove the node that adds it.")

    def set_injections(self, key, injections):
        refuse(f"what another node injects into the model ('{key}')", "Remove that node.")

    def get_key_patches(self, filter_prefix=None):
        refuse("a merge or an extraction of weights", "Load the model with a native loader for it.")

    def model_state_dict_for_saving(self, model=None, prefix=""):
        refuse("saving the model", "Load the model with a native loader for it.")


def refuse(what: str, instead: str) -> NoReturn:
    raise ValueError(f"model: {what} is not possible with Parallel DiT's weights, which are on its ranks. {instead}")


def make_model(checkpoint: Checkpoint, key: ModelKey, comm_overlap: bool) -> RemoteModelPatcher:
    """The MODEL for this checkpoint. Starts nothing and loads nothing."""
    stub = RemoteDiffusionModel(checkpoint, key, comm_overlap)
    if not checkpoint.family.in_comfyui:  # which takes it for one with similar keys
        raise ValueError(
            f"model_name: {checkpoint.path.name} is a model of the kind {checkpoint.family.name}, which ComfyUI itself does "
            "not have: it can be run from Python only."
        )
    config = comfy.model_detection.model_config_from_unet(stub.native_tensors, "")
    if config is None:
        raise ValueError(f"model_name: this ComfyUI does not know the model in {checkpoint.path.name}. Update ComfyUI.")
    config.unet_config["disable_unet_model_creation"] = True
    config.set_inference_dtype(stub.dtype, None)
    stub.weights = NativeWeights(stub.native_tensors, config)
    model = config.get_model({}, "")
    model.diffusion_model = stub
    # Nothing is computed here, so nothing need be reserved: conditional and unconditional come as one batch if they fit.
    model.memory_usage_factor = 0.0
    patcher = RemoteModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )
    add_side_by_side(patcher)
    return patcher


def remote_stub(model: comfy.model_patcher.ModelPatcher) -> RemoteDiffusionModel:
    """The stub inside a MODEL. ValueError if the MODEL is not from Parallel DiT Loader."""
    stub = getattr(getattr(model, "model", None), "diffusion_model", None)
    if not isinstance(stub, RemoteDiffusionModel):
        raise ValueError("model: this MODEL runs in ComfyUI itself. Load it with Parallel DiT Loader to use PipeFusion.")
    return stub
