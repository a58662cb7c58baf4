"""Controls of VACE's kind (Fun control of Qwen-Image 2.1 and MiniMax H3), run in ComfyUI's process. Ranks get residuals.

The node puts a patch around some blocks of the native model. A branch of copies of such blocks starts from the first block's
input, and each copy adds to the output of one block, for all tokens. The branch reads timesteps and positions, but no
block's output. So the native model runs here without its blocks. Each patch is called around a block that returns zeros;
what it adds is the residual.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import comfy.model_patcher
import comfy.ops
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import values_of
from parallel_backend.client.call import Residuals
from parallel_backend.own_class.calls.residuals import AROUND, BLOCKS, REPLACED

from ...ui.host import refuse
from ...ui.other_nodes import is_known
from ..native.native_call import NativeArguments, NativeClass
from .layers_here import LayersHere

CONTROL = re.compile(r"nodes_(?:qwen\.QwenImage21|minimax_h3\.MiniMaxH3)FunControlBlockPatch")
"""Class of the nodes' patches around a block. All patches of a branch have the same `control_patch`. `previous`: the patch
that was around the block before, or None."""

Replacement = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def controls_around(function: Any) -> list[Any]:
    """Return the controls among the patches around a block, outermost first."""
    controls = []
    while function is not None and is_known(CONTROL, function):
        controls.append(function)
        function = function.previous
    return controls


def below_controls(function: Any) -> Any:
    """Return the patch around a block inside its controls. None: there is no other."""
    controls = controls_around(function)
    return controls[-1].previous if controls else function


Controls = Mapping[tuple[str, int], list[Any]]
"""(kind, number) of a block, as ComfyUI names it -> the controls around it."""


def sequence_controls(options: Mapping[str, Any]) -> Controls:
    """Return the controls in a call's transformer_options."""
    replaced = options.get(REPLACED, {}).get(BLOCKS, {})
    found = {block[:2]: controls_around(function) for block, function in replaced.items()}
    return {block: controls for block, controls in found.items() if controls}


class SequenceControl:
    """Computes the residuals of such controls, with the checkpoint's layers around the blocks."""

    def __init__(self, checkpoint: Checkpoint, native: NativeClass, unet_config: Mapping[str, Any], dtype: torch.dtype):
        """`native`: ComfyUI's class. `unet_config`: its arguments. `dtype`: compute dtype of the ranks."""
        self._checkpoint, self._native, self._unet_config, self._dtype = checkpoint, native, unet_config, dtype
        self.layers = LayersHere(self._make, "a Fun ControlNet")

    def residuals(
        self,
        model: comfy.model_patcher.ModelPatcher,
        controls: Controls,
        call: NativeArguments,
        is_carried: bool,
    ) -> Residuals:
        """Residuals for all tokens, in the class's order, on the CPU, by the names of own_class.calls.residuals. `model`:
        from `layers`. `call`: the arguments of the native class's `forward` if `is_carried`, otherwise of its `_forward`."""
        added = self._added(model, controls, call, self._native.forward if is_carried else self._native._forward)
        return {f"{AROUND}{kind}.{index}": residual for (kind, index), residual in added.items()}

    def _added(
        self,
        model: comfy.model_patcher.ModelPatcher,
        controls: Controls,
        call: NativeArguments,
        forward: Callable[..., Any],
    ) -> dict[tuple[str, int], torch.Tensor]:
        first = [control.control_patch for (_, index), around in controls.items() if index == 0 for control in around]
        if any(control.control_patch not in first for around in controls.values() for control in around):
            refuse("a control that starts after the first block", "To use it, load the model with ComfyUI's own loader.")
        added: dict[tuple[str, int], torch.Tensor] = {}

        def around(block: tuple[str, int]) -> Replacement:
            def replaced(args: dict[str, Any], _more: dict[str, Any]) -> dict[str, Any]:
                patch = None
                for control in reversed(controls.get(block, [])):
                    outer = copy.copy(control)
                    outer.previous, patch = patch, outer
                if patch is not None:
                    zeros = torch.zeros_like(args["img"])
                    residual = patch(args, {"original_block": lambda _args: {"img": zeros}})["img"]
                    if residual.any():  # outside of its start and end a control adds nothing
                        added[block] = residual if residual.ndim == 3 else residual[None]
                        added[block] = added[block].cpu()  # those of a video would fill the device together
                return {"img": args["img"]}

            return replaced

        layers = model.model.diffusion_model
        every = ((kind, index) for kind in {kind for kind, _ in controls} for index in range(len(_blocks_of(layers))))
        inside = {**call.options, REPLACED: {BLOCKS: {block: around(block) for block in every}}}
        x = call.latents[0] if len(call.latents) == 1 else list(call.latents)
        forward(layers, x, call.timestep, transformer_options=inside, **call.others)
        return added

    def _make(self) -> torch.nn.Module:
        """ComfyUI's class, with blocks that have no weights."""
        settings = {**self._unet_config, "dtype": self._dtype, "device": "meta"}
        layers = self._native(**settings, operations=comfy.ops.manual_cast)
        checkpoint = self._checkpoint
        blocks = _blocks_of(layers)
        for index in range(len(blocks)):
            blocks[index] = torch.nn.Identity()
        in_file = dict(checkpoint.built.own.keys)
        keys = {name: in_file.get(name, name) for name in layers.state_dict()}
        if missing := [key for key in keys.values() if key not in checkpoint.entries]:
            refuse(
                f"a Fun ControlNet ({checkpoint.path.name} has no {missing[0]})", "Use the model's file in ComfyUI's layout."
            )
        values = values_of(checkpoint, keys.values())
        state = {name: values[keys[name]].to(tensor.dtype) for name, tensor in layers.state_dict().items()}
        layers.load_state_dict(state, assign=True)
        return layers


def _blocks_of(layers: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the list of blocks that controls are around: the longest list, even if its blocks were removed."""
    lists = [each for each in layers.children() if isinstance(each, torch.nn.ModuleList)]
    return max(lists, key=len)
