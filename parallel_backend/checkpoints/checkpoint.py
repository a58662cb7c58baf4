"""Checkpoints on disk: where each parameter's values are in the file, and how they are stored.

Supported are single files in ComfyUI's layout, safetensors or GGUF, with or without the `model.diffusion_model.` prefix.
Opening a file reads its header only. READABLE lists the storage formats.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import TORCH_DTYPES, compute_name, storage_name
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Setup, TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.core.validate import check_model
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.built.built_class import BuiltClass, built_class
from parallel_backend.own_class.cuts.tensor_plan import CutKind, cut_of, cut_side

from .packed_formats import FP8_KINDS, GGUF_BLOCKS, HALF_KINDS
from .quantised_formats import KEPT, kitchen_lacks, quantised_bytes
from .single_file import Contents, contents_of, file_state, refusals
from .tensor_files import GGUF, Entry

READABLE = {"fp32", "bf16", "fp16", "F64", *FP8_KINDS, *GGUF_BLOCKS, *KEPT}
"""The storage formats that this version can read."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number of samples of a file for its fingerprint, and bytes of each. Fine-tuned models differ nearly everywhere."""


@dataclass(frozen=True)
class Checkpoint:
    """A model file whose header has been read, matched to the parameters of its model class."""

    path: Path
    built: BuiltClass
    key_map: dict[str, str]
    """Parameter of the model -> its key in the file, without prefix."""
    entries: dict[str, Entry] = field(repr=False)
    """Key in the file, without prefix -> its tensor's description."""
    file_state: str = ""
    """The state of the file when it was opened, see file_state()."""
    unused: Mapping[str, Entry] = field(default_factory=dict, repr=False)
    """Key -> tensor of the file that no parameter of the model uses."""
    attention: Mapping[str, str] = field(default_factory=dict)
    """Attention layer, by its name in the file -> the attention kernel that the file asks for, see single_file.py."""
    smaller: "Checkpoint | None" = field(default=None, repr=False)
    """If a LoRA enlarges tensors: the checkpoint with the sizes of the file. None: no tensor is enlarged."""

    def check_unchanged(self, expected: str = "") -> None:
        """Raise ValueError if the file's state is no longer `expected`. Empty: the state when the file was opened."""
        if file_state(self.path) == (expected or self.file_state):
            return
        if not self.path.is_file():
            raise ValueError(
                f"model_name: {short(self.path.name)} was removed from disk while it was in use. Weights that are not in "
                "memory must be read from it. Queue the prompt again when the file is back."
            )
        raise ValueError(
            f"model_name: {short(self.path.name)} was overwritten, replaced or cut on disk while it was in use. Its weights "
            "would come from two files. Queue the prompt again when the file is complete."
        )

    @property
    def has_changed(self) -> bool:
        """Whether the file exists and has changed since it was opened. A file that is missing for a moment, for example on a
        network drive, has not changed."""
        return self.path.is_file() and file_state(self.path) != self.file_state

    def fingerprint(self) -> str:
        """Return a digest of the file's size and samples, but not of its name. It shows whether two machines have the same
        file, without reading all of it; models of one kind have equal headers and sizes. Raises ValueError if it cannot be
        read."""
        digest = hashlib.blake2b(digest_size=16)
        try:
            size = self.path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with self.path.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise ValueError(f"model_name: {short(self.path.name)} cannot be read ({short(error)}).") from error
        return digest.hexdigest()

    def check_fingerprint(self, expected: str) -> None:
        """Raise ValueError if this machine's file does not have the fingerprint `expected`."""
        if self.fingerprint() != expected:
            raise ValueError(
                f"model_name: {short(self.path, 300)} differs between this machine and ComfyUI's machine. Copy the file, or "
                "share the folder."
            )

    @property
    def dtype(self) -> str:
        """The weight_dtype that leaves most values as they are stored, on CUDA ranks.

        It is fp8_e4m3fn for plain fp8 of either kind. It is bf16, the compute dtype, for quantized files and GGUF, which
        stay packed under every weight_dtype. CPU ranks compute them in fp32, and convert plain fp8 to fp32.
        """
        if (most := self._most).scale is not None or most.dtype in GGUF_BLOCKS or most.dtype in KEPT:
            return "bf16"
        return "fp8_e4m3fn" if most.dtype in FP8_KINDS else most.dtype

    @cached_property
    def _most(self) -> Entry:
        """An entry with the storage format that most values have."""
        sizes: Counter[tuple[str, bool]] = Counter()
        examples: dict[tuple[str, bool], Entry] = {}
        for entry in self.entries.values():
            storage = entry.dtype, entry.scale is not None
            sizes[storage] += math.prod(entry.shape)
            examples.setdefault(storage, entry)
        return examples[max(sizes, key=lambda storage: sizes[storage])]

    @property
    def original_shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape of its tensor."""
        return {key: entry.shape for key, entry in self.entries.items()}

    @cached_property
    def targets(self) -> dict[str, str]:
        """Key -> the parameter that it is for."""
        return {key: target for target, key in self.key_map.items()}

    def check_degrees(self, degrees: Degrees) -> None:
        """Raise ValueError, which names the widget, if the model does not allow these degrees."""
        own = self.built.own
        check_model(degrees, len(own.blocks), own.heads, own.head_units, self.tensor_degrees, short(self.path.name))

    @cached_property
    def tensor_degrees(self) -> frozenset[int] | None:
        """The tensor-parallel degrees that cut no group of a quantized weight's values apart. None: all, because no weight
        has groups."""
        plan = self.built.tensor_plan
        cuts = {
            (cut, self.shape(target)[1], entry.kept_layer.unit)
            for target, key in self.key_map.items()
            if (entry := self.entries[key]).dtype in KEPT and (cut := cut_of(plan, target)) and cut.kind == CutKind.ROW.value
        }
        if not cuts:
            return None
        return frozenset(
            degree
            for degree in range(1, self.built.own.heads + 1)
            if not any(
                span.start % unit or span.stop % unit
                for cut, columns, unit in cuts
                for index in range(degree)
                for span in cut_side(cut, columns, index, degree)
            )
        )

    def is_enlarged(self, target: str) -> bool:
        """Return whether a LoRA makes the parameter larger than it is in the file."""
        return self.smaller is not None and self.smaller.shape(target) != self.shape(target)

    def shape(self, target: str) -> tuple[int, ...]:
        """Return the shape of the complete parameter."""
        return self.entries[self.key_map[target]].shape

    def storage(self, target: str, dtype_name: str) -> str | None:
        """Return the format in which a rank stores a linear layer's weight: from FP8_KINDS, HALF_KINDS, GGUF_BLOCKS or KEPT.

        None: the compute dtype. weight_dtype fp8_e4m3fn rounds all weights to fp8, and int8 rounds the blocks' weights to
        int8_tensorwise. Neither rounds the other weights of a quantized file, whose author left them in full precision.
        `dtype_name`: see core/dtypes.py.
        """
        entry = self.entries[self.key_map[target]]
        if target in self.built.exact or self.is_enlarged(target) or entry.rounded is not None:
            return None
        fp8 = dtype_name.startswith("fp8")
        if entry.dtype in {*GGUF_BLOCKS, *KEPT} or (entry.dtype in FP8_KINDS and (entry.scale is not None or fp8)):
            return entry.dtype
        kept = storage_name(dtype_name)
        if kept in HALF_KINDS:
            return kept if kept != compute_name(dtype_name) else None
        if self._most.dtype in {*GGUF_BLOCKS, *KEPT, *FP8_KINDS}:
            # A quantised file's 16-bit weights stay packed on ranks that compute in fp32, where they would double.
            return entry.dtype if entry.dtype in HALF_KINDS and compute_name(dtype_name) == "fp32" else None
        if kept == "int8":
            return "int8_tensorwise" if target.partition(".")[0] in self.built.counts else None
        return kept if fp8 else None

    def nbytes(self, target: str, dtype_name: str) -> int:
        """Return the bytes of the complete parameter on a rank. A matrix is assumed to be a linear layer's weight."""
        shape = self.shape(target)
        storage = self.storage(target, dtype_name) if len(shape) == 2 else None
        if storage in GGUF_BLOCKS:
            values, size = GGUF_BLOCKS[storage]
            return math.prod(shape) // values * size
        if storage in HALF_KINDS:
            return math.prod(shape) * 2
        if storage in KEPT:
            entry = self.entries[self.key_map[target]]
            scales = {leaf: (tensor.shape, tensor.dtype) for leaf, tensor in entry.scales.items()}
            return quantised_bytes(storage, shape, entry.shape, scales)
        return math.prod(shape) * (
            1 if storage else self.compute_dtype(target, TORCH_DTYPES[compute_name(dtype_name)]).itemsize
        )

    def compute_dtype(self, target: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of this parameter in a model that computes in `dtype`."""
        return torch.float32 if target in self.built.exact else dtype


def open_setup(setup: Setup) -> Checkpoint:
    """Return the checkpoint of a model that the client has opened. Raises ValueError as `open_own_class` does."""
    return open_own_class(setup.path, setup.own_class, setup.enlarged)


def open_own_class(path: Path, own: OwnClass, enlarged: TensorSizes = ()) -> Checkpoint:
    """Return the checkpoint of a file. Raises ValueError as `contents_of` and `checkpoint_of` do."""
    with refusals(path):
        return checkpoint_of(contents_of(path).converted(own.conversion), own, enlarged)


def checkpoint_of(contents: Contents, own: OwnClass, enlarged: TensorSizes = ()) -> Checkpoint:
    """Return the checkpoint of a file with these contents. Tensors that the class does not use are ignored, as ComfyUI does.

    `enlarged`: key -> size, for tensors that a LoRA enlarges by adding zeros after the file's values.

    Raises ValueError, with a text for the user, if the class cannot be built or a scale of 8-bit values is unused. Raises it
    also if a parameter is missing in the file, or has another shape or an unreadable format there.
    """
    name = contents.name
    try:
        built = built_class(own)
    except Exception as error:  # of any kind: its code is not known
        raise ValueError(
            f"model_name: {name}: ComfyUI's class {own.name} cannot be built on ranks ({type(error).__name__}: {error}). "
            "Load it with ComfyUI's own loader, on one GPU."
        ) from error
    # Tables that the class computes may be missing, or be there as a marker without values.
    entries = {key: entry for key, entry in contents.entries.items() if 0 not in entry.shape}
    keys, class_name = dict(own.keys), adapter_of(own.kind).own_name
    names = {target: class_name(target) for target in built.shapes}
    named = {target: keys.get(name, name) for target, name in names.items()}
    key_map = {target: key for target, key in named.items() if target in built.parameters or key in entries}
    used = dict.fromkeys(key_map.values())
    if missing := [key for key in used if key not in entries]:
        raise ValueError(
            f"model_name: {name} lacks {short(missing[0])}" + f" and {len(missing) - 1} more." * (len(missing) > 1)
        )
    unused = {key: entry for key, entry in entries.items() if key not in used}
    if refused := [key for key in unused if _scales_values(key, entries)]:
        raise ValueError(
            f"model_name: {name} has {short(refused[0])}{f' and {len(refused) - 1} more' * (len(refused) > 1)}, which "
            f"ComfyUI's class {own.name} does not use. It is not loaded, because the image would be wrong."
        )
    sizes, of_file = dict(enlarged), {key: entries[key] for key in used}
    for target, key in key_map.items():
        entry, needed = entries[key], built.shapes[target]
        if entry.lacks_scale:
            raise ValueError(
                f"model_name: {name} has scaled weights, but lacks the scale of {short(key)}. The file is damaged, or "
                "its conversion was stopped. Use another copy."
            )
        if entry.dtype not in READABLE:
            among = f" It can read these GGUF types: F32, F16, BF16, {', '.join(GGUF_BLOCKS)}."
            raise ValueError(
                f"model_name: {name} has {short(key)} as {short(entry.dtype)}, which this version cannot read."
                + among * (contents.path.suffix.lower() in GGUF)
            )
        if entry.dtype in KEPT and (why := kitchen_lacks(entry.dtype)):
            raise ValueError(f"model_name: {name} has {short(key)} as {entry.dtype}, which needs comfy-kitchen: {why}.")
        # Sizes of 1 are ignored, since GGUF's tools may drop them, but not of a matrix, which may stay packed in its rows.
        found = sizes.get(key, entry.shape)
        compared = [[size for size in shape if size != 1 or len(needed) == 2] for shape in (found, needed)]
        if compared[0] != compared[1]:
            raise ValueError(
                f"model_name: {name} has {short(key)} in the shape {short(list(found))}, but ComfyUI's class {own.name} has "
                f"{list(needed)}. The file is damaged, or for another version of the class."
            )
    opened = Checkpoint(contents.path, built, key_map, of_file, contents.file_state, unused, contents.attention)
    if not enlarged:
        return opened
    larger = {key: replace(entry, shape=sizes.get(key, entry.shape)) for key, entry in of_file.items()}
    return replace(opened, entries=larger, smaller=opened)


def with_class(checkpoint: Checkpoint, own: OwnClass) -> Checkpoint:
    """Return the checkpoint with a class that has other test results, for example about layers that tensor ranks share."""
    return replace(checkpoint, built=replace(built_class(own), call=checkpoint.built.call))


def _scales_values(key: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether the tensor is the scale of a weight in 8 bits, whose values mean nothing without it."""
    layer, _, leaf = key.rpartition(".")
    weight = entries.get(f"{layer}.weight")
    return "scale" in leaf and weight is not None and weight.dtype in {*FP8_KINDS, *KEPT}
