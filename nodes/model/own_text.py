"""ComfyUI's own class computes on a prompt's text before sampling, in this process, by its own method."""

from collections.abc import Mapping
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import Reader, reading
from parallel_backend.families.own_class.building import build
from parallel_backend.families.own_class.family import OwnClassFamily

from .patch_trial import Patch
from .text_model import TEXT_METHOD, NativeText, patched


class OwnText(NativeText):
    """As NativeText. A layer's weights are read when it is called, so that those of blocks are not. None is kept."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        super().__init__(checkpoint)
        self._dtype = dtype

    def _computed(self, patches: Mapping[str, list[Patch]], text: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        family = self._checkpoint.family
        assert isinstance(family, OwnClassFamily)
        assert family.own is not None
        model = build(family.own, self._dtype)
        unread = {module: name for name, module in model.named_modules()}
        with reading(self._checkpoint) as reader:

            def read(module: torch.nn.Module, _arguments: Any) -> None:
                """With all layers in it: code may use a layer's weight without calling the layer."""
                for each in module.modules():
                    if each in unread:
                        self._read(reader, patches, text.device, each, unread.pop(each))

            self._read(reader, patches, text.device, model, unread.pop(model))
            for module in unread:
                module.register_forward_pre_hook(read)
            return getattr(model, TEXT_METHOD)(text, *more, **named)

    def _read(
        self,
        reader: Reader,
        patches: Mapping[str, list[Patch]],
        device: torch.device,
        module: torch.nn.Module,
        name: str,
    ) -> None:
        """Give the module the file's values, and put its tables on the device."""
        values = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for leaf, value in values.items():
            key = f"{name}.{leaf}".strip(".")
            if key in self._checkpoint.key_map:
                value = patched(reader.values(key, value.dtype, None, device), patches, key)
            if leaf in module._parameters:
                module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[leaf] = value.to(device)
