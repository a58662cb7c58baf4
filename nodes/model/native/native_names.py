"""Attributes and tensor names of the native model, without values, for other nodes that look them up."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import values_of

from ...ui.host import on_behalf, refuse


class NativeNames:
    """Attributes as a native module would have them, down to its tensors, which have a shape and no values.

    A list of blocks has a length and members, which nodes that compile each block ask for. Setting an attribute raises an
    error, because the ranks would never see it.
    """

    comfy_cast_weights = True
    """ComfyUI's flag of a layer whose weights are elsewhere: nodes that read weights then ask the ModelPatcher."""
    _checkpoint: Checkpoint
    _tensors: Mapping[str, torch.Tensor]
    _keys: Mapping[str, str]
    _prefix: str

    def __init__(
        self, checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], keys: Mapping[str, str], prefix: str = ""
    ):
        """`tensors`, `keys`: of NativeWeights."""
        vars(self).update(_checkpoint=checkpoint, _tensors=tensors, _keys=keys, _prefix=prefix)

    def at(self, name: str) -> Any:
        """Return the native model's tensor, module or value with this name. Raises AttributeError if it has none."""
        whole = self._prefix + name
        if whole in self._tensors:
            return self._tensors[whole]
        if any(key.startswith(f"{whole}.") for key in self._tensors):
            return NativeNames(self._checkpoint, self._tensors, self._keys, f"{whole}.")
        if self._checkpoint.built.lacks(whole):
            return None
        raise AttributeError(
            f"model: '{whole}' of ComfyUI's model{on_behalf()} is not possible, because Parallel DiT's weights are on "
            "its ranks. Remove the node that asks for it (some ControlNets do), or load the model with ComfyUI's own "
            "loader."
        )

    __getattr__ = at

    def __setattr__(self, name: str, _value: Any) -> NoReturn:
        refuse(f"another '{self._prefix}{name}' in ComfyUI's model", "Remove the node that sets it.")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint's values, which ControlNets for SD3.5 copy into their first layer."""
        keys = {name.removeprefix(self._prefix): key for name, key in self._keys.items() if name.startswith(self._prefix)}
        values = values_of(self._checkpoint, keys.values())
        return {name: values[key] for name, key in keys.items()}

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        refuse("computing with its layers (some ControlNets do)", "Use another ControlNet, or ComfyUI's own loader.")

    def __len__(self) -> int:
        """Length of a list of blocks or layers, up to the last one with a tensor."""
        names = {key.removeprefix(self._prefix).partition(".")[0] for key in self._tensors if key.startswith(self._prefix)}
        return max((int(name) + 1 for name in names if name.isdecimal()), default=0)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.at(str(index))
