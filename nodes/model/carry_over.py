"""Copies everything that nodes have put on a MODEL to another MODEL of the same weights, as ModelPatcher.clone() does within
one model."""

from collections.abc import Collection

import comfy.model_patcher
import comfy.patcher_extension

from ..ui.host import refuse
from .controls.layers_here import Patches
from .lora.left_out import fitting
from .lora.lora import NativeWeights
from .lora.patch_trial import Patch
from .patcher import RemoteModelPatcher

MULTIGPU = "multigpu"
"""ComfyUI's key for copies of a MODEL on other GPUs."""


def carry_over(source: comfy.model_patcher.ModelPatcher, target: RemoteModelPatcher, without: Collection[str] = ()) -> None:
    """Put everything that nodes have put on `source` on the new `target`, in the order of ModelPatcher.clone().

    `without`: keys of wrappers to leave out. Raises ValueError for anything that cannot reach the ranks, as the node itself
    would after Parallel DiT Loader.
    """
    weights = target.model.diffusion_model.weights
    target.patches = _fitting(weights, source.patches, {})
    target.enlarge(target.patches)
    target.patches_uuid = source.patches_uuid  # the name under which ranks keep these patches
    for hook, hooked in source.hook_patches.items():
        target.hook_patches[hook] = _fitting(weights, hooked, target.patches, hooked=True)
    # model_options come before object patches, because add_object_patch writes into them.
    target.model_options = comfy.model_patcher.create_model_options_clone(source.model_options)
    for name, value in source.object_patches.items():
        target.add_object_patch(name, value)
    for name, functions in source.weight_wrapper_patches.items():
        for function in functions:
            target.add_weight_wrapper(name, function)
    for key, value in source.attachments.items():
        copied = value.on_model_patcher_clone() if hasattr(value, "on_model_patcher_clone") else value
        target.set_attachments(key, copied)
    for key, models in source.additional_models.items():
        if key == MULTIGPU and models:
            refuse("ComfyUI's MultiGPU CFG Split", "Remove that node: Parallelize Model replaces it.")
        target.set_additional_models(key, [model.clone() for model in models])
    for kind, by_key in source.callbacks.items():
        for key, functions in by_key.items():
            for function in functions:
                target.add_callback_with_key(kind, key, function)
    for kind, by_key in source.wrappers.items():
        for key, functions in by_key.items():
            if key not in without:
                for function in functions:
                    target.add_wrapper_with_key(kind, key, function)
    for key, injections in source.injections.items():
        target.set_injections(key, injections)
    target.forced_hooks = source.forced_hooks.clone() if source.forced_hooks else source.forced_hooks
    target.hook_mode = source.hook_mode
    for callback in source.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_CLONE):
        callback(source, target)


def _fitting(weights: NativeWeights, patches: Patches, present: Patches, hooked: bool = False) -> dict[str, list[Patch]]:
    added = [(key, patch) for key, key_patches in patches.items() for patch in key_patches]
    kept: dict[str, list[Patch]] = {}
    for (key, patch), fits in zip(added, fitting(weights, added, present, hooked), strict=True):
        if fits:
            kept.setdefault(key, []).append(patch)
    return kept
