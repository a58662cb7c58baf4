"""The native MODEL without weights: ComfyUI's own BaseModel of the file, whose diffusion_model asks the ranks."""

import copy
import uuid
import weakref
from typing import Any

import comfy.model_management
import comfy.patcher_extension
import torch

from parallel_backend.client.registry import registry
from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.adapters.adapters import adapter_of

from ..ui.host import refuse
from ..ui.node_text import tell
from ..ui.other_nodes import calling_nodes, named
from ..ui.prompt_graph import present_prompt
from .call.concurrent_conds import add_concurrent_conds
from .call.concurrent_windows import add_concurrent_windows
from .call.diffusion_model import RemoteDiffusionModel
from .end_of_run import tell_of_run
from .loading.model_file import ModelFile
from .lora.bypass import bypass_patches, check_injections
from .lora.left_out import UNNAMED, fitting
from .lora.lora import NativeWeights
from .lora.saving import for_saving, key_patches, patched_weight, stored_weights
from .patches.reach import Unread, refuse_unread
from .patches.rope import riflex
from .patches.text_guidance import GUIDANCE_KEY, text_guidance
from .rank_memory import OnAnotherGPU, RankMemoryPatcher, other_gpus
from .run.kept_run import end
from .run.sampling_run import SamplingRun
from .run.step_cache import CACHE_KEY, HOOKED, begin_cache

INSIDE = "diffusion_model"
"""Attribute of ComfyUI's BaseModel that has the native model."""
COMPILE_WRAPPER = "torch.compile"
"""Key of the wrappers that ComfyUI (comfy_api/torch_helpers) and KJNodes put around a model call to compile it."""
OF_COMPILED = ("_orig_mod", "_torchdynamo_orig_callable")
"""Attributes that torch.compile's results have: of a module, and of any other callable."""
OF_ATTENTION = ".comfy_attention"
"""End of the names of object patches that ComfyUI from 0.38 on makes of a LoRA's requests for an attention kernel."""
ATTENTION_SKIPPED = "this LoRA asks for an attention kernel, and is used with that of the MODEL"
COMPILE_SKIPPED = (
    "torch.compile is skipped, because this MODEL's layers are on its ranks. To compile them there, turn on compile in "
    "Parallel DiT Loader."
)


class RemoteModelPatcher(RankMemoryPatcher):
    """ModelPatcher of a model whose weights are on ranks. Refuses patches that would not reach them."""

    model: Any
    patches_uuid: uuid.UUID
    is_injected: bool
    _told: tuple[str, ...] = ()

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        """Like ComfyUI's method, without patches of another size, which ComfyUI leaves out later.

        Raises ValueError for a kind of patch that ranks cannot add to their weights, and if no patch fits.
        """
        if not patches:  # ComfyUI's loader knows none of the file's names, and only logs them
            tell(UNNAMED)
        patches = self._fitting(patches, strength_patch, strength_model)
        added_keys = super().add_patches(patches, strength_patch, strength_model)
        self.enlarge({target if isinstance(target, str) else target[0] for target in patches})
        return added_keys

    def _fitting(self, patches, strength_patch, strength_model, hooked=False):
        names, ours = self.model.state_dict(), {}
        for target, value in patches.items():
            key, offset, function = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
            if key in names:  # others are the text encoder's: a LoRA loader hands over all patches together
                ours[target] = key, (strength_patch, value, strength_model, offset, function)
        fits = dict(zip(ours, fitting(self.stub.weights, list(ours.values()), self.patches, hooked), strict=True))
        return {target: value for target, value in patches.items() if fits.get(target, True)}

    def enlarge(self, keys):
        """Replace the model with a larger one if a patch of these keys enlarges its weights, as ComfyUI does when it loads
        it. Other clones keep the smaller model. Raises ValueError if ranks cannot compute the larger one."""
        stub = self.stub
        larger = stub.enlarged_by({key: self.patches[key] for key in keys if key in self.patches})
        sizes = tuple(sorted((dict(stub.setup.enlarged) | dict(larger)).items()))
        if sizes != stub.setup.enlarged:
            self.model = copy.copy(self.model)
            self.model._modules = {**self.model._modules, INSIDE: stub.enlarged(sizes)}

    def pre_run(self):
        """Prepare a sampling run: the ranks get this patcher's patches, not those of another clone."""
        super().pre_run()
        self.stub.run = SamplingRun(
            weakref.ref(self),
            self.patches,
            bypass_patches(self.injections),
            self.hook_patches,
            self.patches_uuid,
            begin_cache(self),
        )
        if self.stub.run.cache is None and CACHE_KEY in self.model_options["transformer_options"]:
            self.stub.run.tell(HOOKED)
        self.stub.follow_files()
        registry().begin_run()

    def cleanup(self):
        """End a sampling run: report it to the user, and drop its step cache and references to other nodes' objects."""
        run = self.stub.run
        super().cleanup()
        if run.calls:
            tell_of_run(self.stub)
            run.calls.clear()  # ComfyUI cleans up again when another node is at work
        end(self.stub)
        run.cache = None
        run.prepared.clear()

    def model_patches_models(self):
        """Return the models that ComfyUI's method returns, and those of the layers that controls need in this process."""
        self.stub.follow_files()
        options, patches = self.model_options["transformer_options"], [self.patches, bypass_patches(self.injections)]
        here = self.stub.controls_here.models(options, patches, self.hook_patches.values(), self.patches_uuid)
        return [*super().model_patches_models(), *here]

    @property
    def stub(self) -> RemoteDiffusionModel:
        return self.model.diffusion_model

    def start_ranks(self) -> None:
        """Begin to start the ranks, while a prompt's other nodes, such as text encoders, compute. Never waits.

        Starts nothing on a Ray cluster.
        """
        devices = self.stub.devices
        if present_prompt() is not None and not any(map(on_ray, devices)):
            registry().begin(devices)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """Like RankMemoryPatcher's method. Raises ValueError if patched values are needed in place, as by other packs'
        saving nodes."""
        if force_patch_weights:
            refuse("saving or extracting weights", "To use it, load the model with ComfyUI's own loader.")
        return super().partially_load(device_to, extra_memory, force_patch_weights)

    def get_nested_additional_models(self):
        """Return the models that ComfyUI loads with this one: those of its own method, and patchers for the ranks' memory on
        other GPUs of ComfyUI."""
        patchers = self.stub.patchers_elsewhere
        devices = other_gpus(self.load_device, self.stub.setup.devices)
        for device in devices:
            if device not in patchers:
                patchers[device] = OnAnotherGPU.of(self.stub, device)
        return [*super().get_nested_additional_models(), *(patchers[device] for device in devices)]

    def add_wrapper_with_key(self, wrapper_type, key, wrapper):
        """Like ComfyUI's method. A wrapper that swaps in compiled modules is left out, and the user is told."""
        if key == COMPILE_WRAPPER:
            self._skip(COMPILE_SKIPPED)
        else:
            super().add_wrapper_with_key(wrapper_type, key, wrapper)

    def add_object_patch(self, name, obj):
        """Like ComfyUI's method. A compiled module and a LoRA's request for an attention kernel are left out, and the user
        is told. WanVideoNAG's guidance and RIFLEx become entries of transformer_options.

        Raises ValueError for any other object inside the native model, and for another compute dtype.
        """
        if any(hasattr(obj, attribute) for attribute in OF_COMPILED):
            self._skip(COMPILE_SKIPPED)
            return
        if name.endswith(OF_ATTENTION):
            self._skip(ATTENTION_SKIPPED)
            return
        options = self.model_options["transformer_options"]
        if (guidance := text_guidance(name, obj)) is not None:
            options[GUIDANCE_KEY] = guidance
            return
        if entry := riflex(self.stub.checkpoint.built.options, name, obj):
            options.update(entry)
            return
        if name == INSIDE or name.startswith(f"{INSIDE}."):
            refuse_unread([Unread(f"another '{name}'", obj, by=named(calling_nodes()))])
        if name == "manual_cast_dtype" and obj not in (None, self.stub.dtype):
            refuse(f"computing in another dtype ({obj})", "Choose weight_dtype in Parallel DiT Loader.")
        super().add_object_patch(name, obj)

    def _skip(self, text: str) -> None:
        if text not in self._told:  # a node may add an object patch for each block
            self._told = (*self._told, text)
            tell(text)

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        """Like ComfyUI's method. Raises ValueError for a kind of patch that ranks cannot add to their weights. Raises it
        also for weights with which this process computes a call's arguments, because this process does not know the call's
        strengths."""
        built = self.stub.checkpoint.built
        for target in patches if adapter_of(built.own.kind).computed else ():
            key = target if isinstance(target, str) else target[0]
            if built.is_elsewhere(key.removeprefix(f"{INSIDE}.")):
                refuse(f"a LoRA in a conditioning (a hook) for {key}", "Load it for the whole model.")
        patches = self._fitting(patches, strength_patch, strength_model, hooked=True)
        uuid_before = self.patches_uuid
        added_keys = super().add_hook_patches(hook, patches, strength_patch, strength_model)
        # ComfyUI sets a new uuid. Ranks know a hook's patches by the hook's reference, which stays the same in the next run.
        self.patches_uuid = uuid_before
        return added_keys

    def patch_hooks(self, hooks):
        """Store the hooks: the ranks have all hooks' patches, and each model call sends the strengths."""
        self.current_hooks = hooks

    def add_weight_wrapper(self, name, function):
        refuse(f"a wrapper around the weight {name}", "Remove the node that adds it.")

    def set_injections(self, key, injections):
        """Like ComfyUI's method. Raises ValueError for any injection except a LoRA in bypass mode."""
        check_injections(self.stub.weights, key, injections)
        super().set_injections(key, injections)
        self.patches_uuid = uuid.uuid4()

    def remove_injections(self, key):
        """Do the same as ComfyUI's method."""
        super().remove_injections(key)
        self.patches_uuid = uuid.uuid4()

    def inject_model(self):
        """Call other nodes' callbacks, as ComfyUI's. The ranks add the injected LoRAs."""
        if any(self.injections.values()) and not (self.is_injected or self.skip_injection):
            self.is_injected = True
            self._call_back(comfy.patcher_extension.CallbacksMP.ON_INJECT_MODEL)

    def eject_model(self):
        """Call other nodes' callbacks, as ComfyUI's method does. The model in this process has nothing to remove."""
        if self.is_injected:
            self.is_injected = False
            self._call_back(comfy.patcher_extension.CallbacksMP.ON_EJECT_MODEL)

    def _call_back(self, kind: str) -> None:
        for callback in self.get_all_callbacks(kind):
            callback(self)

    def deepclone_multigpu(self, *_arguments, **_named):
        """Always raises ValueError, because ComfyUI would load the model's file again for each GPU."""
        refuse("ComfyUI's MultiGPU CFG Split", "Remove that node: the loader's devices and degrees replace it.")

    def get_key_patches(self, filter_prefix=None):
        """Like ComfyUI's method, with the file's values. Raises ValueError for a quantized file."""
        stored = stored_weights(self.stub.weights, "merging it into another model")
        return key_patches(stored, self.patches, filter_prefix)

    def model_state_dict_for_saving(self, model=None, prefix=""):
        """Like ComfyUI's method, with the file's values. Raises ValueError for a quantized file."""
        return for_saving(self, self.stub.weights, prefix)

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, force_cast=False):
        """Like ComfyUI's method, for a value that is saved. No weight can be patched in place."""
        assert return_weight
        stored = self.stub.weights.stored(key)
        if stored is None or key not in self.patches:
            return stored
        return patched_weight(self.stub.weights, key, self.patches[key], stored.dtype)


def make_model(
    file: ModelFile, setup: Setup, comm_overlap: bool, devices: tuple[str, ...] | None = None
) -> RemoteModelPatcher:
    """Return the MODEL for this file. Nothing is started or loaded. `devices`: as in RemoteDiffusionModel; None: those of
    the setup."""
    model = file.model
    dtype = compute_dtype(setup.dtype, torch.device(device_kind(setup.devices[0])))
    model.model_config.set_inference_dtype(dtype, None)
    weights = NativeWeights(file.checkpoint, file.own, dtype)
    model.diffusion_model = RemoteDiffusionModel(file.checkpoint, setup, devices or setup.devices, comm_overlap, weights)
    # This process computes nothing. With no memory to reserve, ComfyUI joins conditional and unconditional to one batch.
    model.memory_usage_factor = 0.0
    patcher = RemoteModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )
    add_concurrent_conds(patcher)
    add_concurrent_windows(patcher)
    return patcher
