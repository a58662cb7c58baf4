"""A checkpoint's tensors one by one, under their keys in the family's original layout."""

from collections import defaultdict
from dataclasses import replace
from functools import cached_property

import torch

from parallel_backend.families.base.family import Source

from .checkpoint import PREFIXES, Checkpoint, to_original
from .packed_formats import FP8_KINDS
from .reader import reading
from .tensor_files import Entry, read_header

PLAIN = ("fp32", "bf16", "fp16", "F64", *FP8_KINDS)
"""Storage formats that torch has as they are."""


class OriginalTensors:
    """Reads a file only when a tensor is asked for, and keeps none."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._text = frozenset(checkpoint.text_keys(""))

    @cached_property
    def _targets(self) -> dict[str, list[str]]:
        """Key -> the parameters that have their values from it."""
        targets = defaultdict(list)
        for target, source in self._checkpoint.family.file.key_map(self._checkpoint.config).items():
            targets[source.key].append(target)
        return dict(targets)

    def value(self, key: str) -> torch.Tensor:
        """float32, in the CPU's memory. For files of every layout and format. KeyError if no parameter has it."""
        checkpoint, host = self._checkpoint, torch.device("cpu")
        if key in self._text:
            with reading(replace(checkpoint, key_map={key: Source(key)})) as reader:
                return reader.values(key, torch.float32, None, host)
        with reading(checkpoint) as reader:
            state = {target: reader.values(target, torch.float32, None, host) for target in self._targets[key]}
        return to_original(checkpoint.family, checkpoint.config, state)[key]

    @cached_property
    def _unused(self) -> dict[str, Entry]:
        """Tensors of the file that the family computes itself, and native models have."""
        entries, _ = read_header(self._checkpoint.path)
        computed = self._checkpoint.family.file.computed(self._checkpoint.config)
        return {key: entries[prefix + key] for prefix in PREFIXES for key in computed if prefix + key in entries}

    def stored(self, key: str) -> torch.Tensor | None:
        """As the file has it: a view of the mapped file, which takes no memory of its own. None: the file has none.

        ValueError where the file has it in another layout (diffusers), quantised or in blocks.
        """
        checkpoint = self._checkpoint
        if not checkpoint.path.is_dir():
            entry = checkpoint.entries.get(key) or self._unused.get(key)
            if entry is None:
                return None
            if entry.dtype in PLAIN and entry.scale is None:
                with reading(checkpoint) as reader:
                    return reader.tensor(entry)
        raise ValueError(f"{checkpoint.path.name} does not hold {key} as plain values in ComfyUI's own layout")
