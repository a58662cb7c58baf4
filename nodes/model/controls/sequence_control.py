"""Controls of VACE's kind (Fun control of Qwen-Image 2.1 and MiniMax H3), run in ComfyUI's process. Ranks get residuals.

The node puts a patch around some blocks of the native model. A branch of copies of such blocks starts from the first block's
input. Each copy adds to the output of one block, for all tokens. The branch reads timesteps and positions, but no block's
output. So the native model runs here without its blocks. Each patch is called around a block that returns zeros; what it
adds is the residual.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallel_backend.client.call import Residuals
from parallel_backend.own_class.calls.residuals import AROUND, BLOCKS, REPLACED

from ...ui.host import refuse
from ...ui.other_nodes import is_known
from ..native.native_call import NativeArguments, NativeClass

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


def residuals_of(
    layers: torch.nn.Module, native: NativeClass, controls: Controls, call: NativeArguments, is_carried: bool
) -> Residuals:
    """Return the residuals that `controls` add around blocks: for all tokens, in the class's own order, on the CPU. Their
    names: see own_class.calls.residuals.

    `layers`: the native model, of class `native`, without its blocks. `call`: arguments of the class's `_forward`. If
    `is_carried`: of its `forward`.
    """
    first = [control.control_patch for (_, index), around in controls.items() if index == 0 for control in around]
    if any(control.control_patch not in first for around in controls.values() for control in around):
        refuse("a control that starts after the first block", "To use it, load the model with ComfyUI's own loader.")
    residuals: dict[str, torch.Tensor] = {}

    def around(kind: str, index: int) -> Replacement:
        def replaced(args: dict[str, Any], _more: dict[str, Any]) -> dict[str, Any]:
            patch = None
            for control in reversed(controls.get((kind, index), [])):
                outer = copy.copy(control)
                outer.previous, patch = patch, outer
            if patch is not None:
                zeros = torch.zeros_like(args["img"])
                residual = patch(args, {"original_block": lambda _args: {"img": zeros}})["img"]
                if residual.any():  # outside of its start and end a control adds nothing
                    whole = residual if residual.ndim == 3 else residual[None]
                    residuals[f"{AROUND}{kind}.{index}"] = whole.cpu()  # those of a video would fill the device together
            return {"img": args["img"]}

        return replaced

    every = ((kind, index) for kind in {kind for kind, _ in controls} for index in range(len(blocks_of(layers))))
    inside = {**call.options, REPLACED: {BLOCKS: {block: around(*block) for block in every}}}
    x = call.latents[0] if len(call.latents) == 1 else list(call.latents)
    forward = native.forward if is_carried else native._forward
    forward(layers, x, call.timestep, transformer_options=inside, **call.others)
    return residuals


def blocks_of(layers: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the list of blocks that controls are around: the longest one, with or without its blocks."""
    lists = [each for each in layers.children() if isinstance(each, torch.nn.ModuleList)]
    return max(lists, key=len)
