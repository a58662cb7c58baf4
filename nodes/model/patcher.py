"""The native MODEL without weights: ComfyUI's own BaseModel for the family, whose diffusion_model asks the ranks."""

import json
import logging
import uuid
import weakref

import comfy.model_detection
import comfy.model_management

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.registry import ModelKey, registry

from ..ui.host import refuse
from ..ui.node_text import say
from ..ui.other_nodes import calling_nodes, named
from .bypass import bypass_patches, check_injections
from .concurrent_conds import add_concurrent_conds
from .diffusion_model import RemoteDiffusionModel
from .fun_control import fun_controls
from .lora import NativeWeights
from .rank_memory import OnAnotherGPU, RankMemoryPatcher, other_gpus
from .reach import Unread, refuse_unread
from .rope import riflex
from .saving import for_saving, key_patches, patched_weight, stored_weights
from .step_cache import begin_cache
from .text_guidance import GUIDANCE_KEY, text_guidance

log = logging.getLogger(__name__)

INSIDE = "diffusion_model"
"""Attribute of ComfyUI's BaseModel that has the native model."""
COMPILE_WRAPPER = "torch.compile"
"""Key of ComfyUI's wrapper around a model call (comfy_api/torch_helpers), and of KJNodes'."""
OF_COMPILED = ("_orig_mod", "_torchdynamo_orig_callable")
"""Attributes of what torch.compile gives for a module, and for anything else that can be called."""
COMPILE_SKIPPED = (
    "torch.compile is skipped: this MODEL's layers are on its ranks. To have them compiled there, set compile on the "
    "loader: Parallel DiT Loader has it."
)


class RemoteModelPatcher(RankMemoryPatcher):
    """ModelPatcher of a model whose weights are on ranks. Refuses patches that would not reach them."""

    _told_of_compile = False

    def __init__(self, model, load_device, *arguments, **named):
        self.load_device = load_device  # ComfyUI 0.3.64 asks for `model_size` before it sets this
        super().__init__(model, load_device, *arguments, **named)

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        """As ComfyUI's. ValueError for a kind of patch that the ranks cannot add to their weights."""
        self._check(patches, strength_patch, strength_model)
        return super().add_patches(patches, strength_patch, strength_model)

    def _check(self, patches, strength_patch, strength_model, hooked=False):
        names = self.model.state_dict()
        for target, value in patches.items():
            key, offset, function = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
            if key in names:  # or it is the text encoder's: a LoRA's patches come all together
                patch = strength_patch, value, strength_model, offset, function
                self.model.diffusion_model.weights.check(key, patch, hooked)

    def pre_run(self):
        """Prepare a sampling run: the ranks get this patcher's patches, not those of another clone."""
        super().pre_run()
        stub = self.model.diffusion_model
        stub.patches, stub.patches_uuid, stub.patcher = self.patches, self.patches_uuid, weakref.ref(self)
        stub.bypass_patches, stub.hook_patches = bypass_patches(self.injections), self.hook_patches
        stub.idle, stub.loaded, stub.turns = None, lambda: None, 0
        stub.cache = begin_cache(self)
        registry().begin_run()

    def cleanup(self):
        """End a sampling run: what was kept of its calls is dropped."""
        stub = self.model.diffusion_model
        cache, stub.cache = stub.cache, None
        super().cleanup()
        if cache is not None:
            cache.tell()

    def model_patches_models(self):
        """As ComfyUI's, with the layers that Fun controls need in this process."""
        models = super().model_patches_models()
        stub = self.model.diffusion_model
        if fun_controls(stub.checkpoint.family, self.model_options["transformer_options"]):
            patches = [self.patches, bypass_patches(self.injections)]
            models.append(stub.fun_control.model(patches, self.hook_patches.values(), self.patches_uuid))
        return models

    @property
    def stub(self) -> RemoteDiffusionModel:
        return self.model.diffusion_model

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """As RankMemoryPatcher's. ValueError where patched values are to be in place afterwards: nodes of ComfyUI's older
        versions that save."""
        if force_patch_weights:
            refuse("saving or extracting weights", "Update ComfyUI, or load the model with a native loader for it.")
        return super().partially_load(device_to, extra_memory, force_patch_weights)

    def get_nested_additional_models(self):
        """As ComfyUI's, which loads them with this one; and the ranks' memory on other GPUs that ComfyUI uses too."""
        places = self.stub.elsewhere
        devices = other_gpus(self.load_device, self.stub.key.devices)
        for device in devices:
            if device not in places:
                places[device] = OnAnotherGPU.of(self.stub, device)
        return [*super().get_nested_additional_models(), *(places[device] for device in devices)]

    def add_wrapper_with_key(self, wrapper_type, key, wrapper):
        """As ComfyUI's. A wrapper that puts compiled modules in place is left out, with a word."""
        if key == COMPILE_WRAPPER:
            self._skip_compile()
        else:
            super().add_wrapper_with_key(wrapper_type, key, wrapper)

    def add_object_patch(self, name, obj):
        """As ComfyUI's. A compiled module is left out, with a word; what is known to be guidance of the look at the text, or
        RIFLEx, goes with the calls.

        ValueError for what else would be put into the native model, or have it compute in another dtype.
        """
        if any(hasattr(obj, attribute) for attribute in OF_COMPILED):
            self._skip_compile()
            return
        stub, options = self.model.diffusion_model, self.model_options["transformer_options"]
        family = stub.checkpoint.family
        if (guidance := text_guidance(family, name, obj)) is not None:
            options[GUIDANCE_KEY] = guidance
            return
        if entry := riflex(family, name, obj):
            options.update(entry)
            return
        if name == INSIDE or name.startswith(f"{INSIDE}."):
            refuse_unread([Unread(f"another '{name}'", obj, by=named(calling_nodes()))])
        if name == "manual_cast_dtype" and obj not in (None, stub.dtype):
            refuse(f"computing in another dtype ({obj})", "Choose weight_dtype in Parallel DiT Loader.")
        super().add_object_patch(name, obj)

    def _skip_compile(self) -> None:
        if not self._told_of_compile:  # a node may come with each block
            self._told_of_compile = True
            log.warning("Parallel DiT: %s", COMPILE_SKIPPED)
            say(f"Parallel DiT: {COMPILE_SKIPPED}")

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        """As ComfyUI's. ValueError for a kind of patch that the ranks cannot add to their weights."""
        self._check(patches, strength_patch, strength_model, hooked=True)
        name = self.patches_uuid
        added = super().add_hook_patches(hook, patches, strength_patch, strength_model)
        self.patches_uuid = name  # the ranks know a hook's patches by its reference, which is the same in the next run
        return added

    def patch_hooks(self, hooks):
        """These hooks' patches count from the next model call on. The ranks have them all, see RemoteDiffusionModel."""
        self.current_hooks = hooks

    def add_weight_wrapper(self, name, function):
        refuse(f"a wrapper around the weight {name}", "Remove the node that adds it.")

    def set_injections(self, key, injections):
        """As ComfyUI's. ValueError for anything but a LoRA in bypass mode."""
        check_injections(self.model.diffusion_model.weights, key, injections)
        super().set_injections(key, injections)
        self.patches_uuid = uuid.uuid4()

    def remove_injections(self, key):
        """As ComfyUI's."""
        super().remove_injections(key)
        self.patches_uuid = uuid.uuid4()

    def inject_model(self):
        """Nothing is injected here: the ranks have it."""

    def get_key_patches(self, filter_prefix=None):
        """As ComfyUI's, with the file's values. ValueError for a quantised file or a folder."""
        weights = self.model.diffusion_model.weights
        return key_patches(stored_weights(weights, "merging it into another model"), self.patches, filter_prefix)

    def model_state_dict_for_saving(self, model=None, prefix=""):
        """As ComfyUI's, with the file's values. ValueError for a quantised file or a folder."""
        return for_saving(self, self.model.diffusion_model.weights, prefix)

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, force_cast=False):
        """As ComfyUI's for a patched value to be saved; here no weight is patched in place."""
        assert return_weight
        weights = self.model.diffusion_model.weights
        stored = weights.stored(key)
        if key not in self.patches:
            return stored
        return patched_weight(weights, key, self.patches[key], stored.dtype)


def make_model(checkpoint: Checkpoint, key: ModelKey, comm_overlap: bool) -> RemoteModelPatcher:
    """The MODEL for this checkpoint. Starts nothing and loads nothing."""
    stub = RemoteDiffusionModel(checkpoint, key, comm_overlap)
    if not checkpoint.family.native_classes:  # ComfyUI takes it for one with similar keys
        raise ValueError(
            f"model_name: {checkpoint.path.name} is a model of the kind {checkpoint.family.name}, which ComfyUI itself does "
            "not have: it can be run from Python only."
        )
    config = comfy.model_detection.model_config_from_unet(stub.native_tensors, "", metadata=_metadata(checkpoint))
    if config is None:
        raise ValueError(f"model_name: this ComfyUI does not know the model in {checkpoint.path.name}. Update ComfyUI.")
    if (kind := type(config).__name__) not in checkpoint.family.native_classes:
        raise ValueError(
            f"model_name: ComfyUI takes {checkpoint.path.name} for a model of the kind {kind}, which is not what Parallel "
            f"DiT computes for {checkpoint.family.name}. Load it with Load Diffusion Model, on one GPU."
        )
    config.unet_config["disable_unet_model_creation"] = True
    config.set_inference_dtype(stub.dtype, None)
    stub.weights, stub.native_kind = NativeWeights(checkpoint, stub.native_tensors, config, stub.dtype), kind
    stub.unet_config = config.unet_config
    model = config.get_model({}, "")
    model.diffusion_model = stub
    # Nothing is computed here, so nothing need be reserved: conditional and unconditional come as one batch if they fit.
    model.memory_usage_factor = 0.0
    patcher = RemoteModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )
    add_concurrent_conds(patcher)
    return patcher


def _metadata(checkpoint: Checkpoint) -> dict[str, str] | None:
    """The file's header as ComfyUI's detection reads it."""
    return {"config": json.dumps({"transformer": dict(checkpoint.stated)})} if checkpoint.stated else None
