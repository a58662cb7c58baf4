"""A checkpoint's tensors one by one, under their keys in the family's original layout."""

from collections import defaultdict
from functools import cached_property

import torch

from parallel_backend.core.short_text import short

from .checkpoint import Checkpoint, to_original
from .packed_formats import FP8_KINDS
from .reader import node_value, reading
from .single_file import prefix_of
from .tensor_files import Entry, read_header

PLAIN = ("fp32", "bf16", "fp16", "F64", *FP8_KINDS)
"""Storage formats that torch has as they are."""


class OriginalTensors:
    """Opens a file only for the tensor that is asked for, and keeps no file open."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint

    @cached_property
    def _targets(self) -> dict[str, list[str]]:
        """Key -> the parameters whose values it holds."""
        targets = defaultdict(list)
        for target, source in self._checkpoint.family.file.key_map(self._checkpoint.config).items():
            targets[source.key].append(target)
        return dict(targets)

    def value(self, key: str) -> torch.Tensor:
        """float32 on the CPU, for files of every layout and format. KeyError if no parameter has the key."""
        checkpoint, host = self._checkpoint, torch.device("cpu")
        if key in checkpoint.node_keys:
            return node_value(checkpoint, key, torch.float32)
        with reading(checkpoint) as reader:
            state = {target: reader.values(target, torch.float32, None, host) for target in self._targets[key]}
        return to_original(checkpoint.family, checkpoint.config, state)[key]

    @cached_property
    def _unused(self) -> dict[str, Entry]:
        """Tensors of the file that native models have, while the family computes them."""
        entries = read_header(self._checkpoint.path)[0]
        computed = self._checkpoint.family.file.computed(self._checkpoint.config)
        prefix = prefix_of(entries)
        return {key: entries[prefix + key] for key in computed if prefix + key in entries}

    def stored(self, key: str) -> torch.Tensor | None:
        """A view of the mapped file, in the file's dtype. None if the file lacks the key.

        ValueError for a file in another layout (diffusers), and for quantised values or GGUF's blocks.
        """
        checkpoint = self._checkpoint
        entry = checkpoint.entries.get(key) or self._unused.get(key)
        if entry is None:
            return None
        if entry.dtype in PLAIN and entry.scale is None and not entry.pieces:
            with reading(checkpoint) as reader:
                return reader.tensor(entry)
        raise ValueError(f"{short(checkpoint.path.name)} does not hold {short(key)} as plain values in ComfyUI's own layout")
