"""Attributes and tensor names of the native model, without values, for other nodes that look them up."""

from typing import Any, NoReturn

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import original_values

from ..ui.host import on_behalf, refuse


class NativeNames:
    """Attributes as a native module would have them, down to its tensors, which have a shape and no values.

    A list of blocks has a length and members, as nodes that compile each block ask for. Nothing can be put into any of it:
    nobody would ever look there.
    """

    comfy_cast_weights = True
    """ComfyUI's word for a layer whose weights are elsewhere: nodes that read them ask the ModelPatcher."""

    def __init__(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], prefix: str):
        vars(self).update(_checkpoint=checkpoint, _tensors=tensors, _prefix=prefix)

    def at(self, name: str) -> Any:
        """The tensor or module of that name. AttributeError if the native model has none."""
        whole = self._prefix + name
        if whole in self._tensors:
            return self._tensors[whole]
        if any(key.startswith(f"{whole}.") for key in self._tensors):
            return NativeNames(self._checkpoint, self._tensors, f"{whole}.")
        raise AttributeError(
            f"model: '{whole}' of the native model{on_behalf()} is not possible with Parallel DiT's weights, which are on "
            "its ranks. Remove the node that asks for it (some ControlNets do), or load the model with a native loader."
        )

    __getattr__ = at

    def __setattr__(self, name: str, _value: Any) -> NoReturn:
        refuse(f"another '{self._prefix}{name}' in the native model", "Remove the node that puts it there.")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The checkpoint's own values: ControlNets for SD3.5 begin with a copy of the model's first layer."""
        return original_values(self._checkpoint, self._prefix)

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse("computing with its layers (some ControlNets do)", "Use another ControlNet, or a native loader.")

    def __len__(self) -> int:
        """Of a list of blocks, or of layers some of which have no tensors: up to the last that has one."""
        names = {key.removeprefix(self._prefix).partition(".")[0] for key in self._tensors if key.startswith(self._prefix)}
        return max((int(name) + 1 for name in names if name.isdecimal()), default=0)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.at(str(index))
