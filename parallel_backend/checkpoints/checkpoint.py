"""Checkpoints on disk: a checkpoint's family, where each parameter's values are, and how they are stored.

Supported: single files in original (ComfyUI) key layout, safetensors or GGUF, with or without the `model.diffusion_model.`
prefix. Opening reads headers only. READABLE lists the storage formats.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import TORCH_DTYPES, compute_name, storage_name
from parallel_backend.core.setup import Conversion
from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span
from parallel_backend.core.validate import check_model
from parallel_backend.families import FAMILIES, Family
from parallel_backend.families.base.file_layout import Source
from parallel_backend.families.base.tensor_plan import CutKind, cut_of, cut_side
from parallel_backend.families.others import UnknownModel

from .class_check import check_class
from .file_state import check_file_state, file_state, has_changed
from .limits import check_sizes, check_stated
from .packed_formats import FP8_KINDS, GGUF_BLOCKS, HALF_KINDS
from .quantised_formats import KEPT, quantised_bytes
from .single_file import entries_of, unknown
from .tensor_files import GGUF, Entry

NAMED = "model_name: "
"""Beginning of a refusal: the widget's name."""
MAX_REFUSAL = 1000
"""Most characters of a refusal. The longest list the families, and show three keys."""
READABLE = {"fp32", "bf16", "fp16", "F64", *FP8_KINDS, *GGUF_BLOCKS, *KEPT}
"""Storage formats that can be read."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint of a known family."""

    path: Path
    family: Family
    config: dict[str, Any]
    """Arguments of the family's class."""
    key_map: dict[str, Source]
    """Parameter of the model -> where its values are."""
    entries: dict[str, Entry] = field(repr=False)
    """Key in the file, without prefix -> tensor."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """The model's configuration in a single file's header, see HeaderConfig."""
    file_state: str = ""
    """State of its files when they were opened, see file_state.py."""
    conversion: Conversion = field(default=(), repr=False)
    """By which `entries` of a single file in diffusers' layout have ComfyUI's names."""
    unused: Mapping[str, Entry] = field(default_factory=dict, repr=False)
    """Key -> tensor of a single file that no parameter has the values of. Dropped: nodes hold it against ComfyUI's class."""
    attention: Mapping[str, str] = field(default_factory=dict)
    """Attention layer, by its name in the file -> the kernel that the file asks for, see attention_preferences.py."""
    smaller: "Checkpoint | None" = field(default=None, repr=False)
    """The checkpoint as it is in the file, if a LoRA enlarges tensors (enlarged.py)."""

    def check_unchanged(self, expected: str = "") -> None:
        """ValueError if the files are no longer as they were when they were opened, or as `expected`."""
        check_file_state(self.files, expected or self.file_state, self.path.name)

    @property
    def has_changed(self) -> bool:
        """The files are there, and not as they were when they were opened."""
        return has_changed(self.files, self.file_state)

    @property
    def files(self) -> set[Path]:
        """All files that have tensors."""
        return {entry.file for entry in self.entries.values()}

    @property
    def dtype(self) -> str:
        """The weight_dtype that keeps most values as they are stored, on CUDA ranks.

        Plain fp8 of either kind is fp8_e4m3fn. Quantised files and GGUF are bf16, their compute dtype: they stay packed
        under every weight_dtype. CPU ranks compute them in fp32, and turn plain fp8 into fp32.
        """
        if (most := self._most).scale is not None or most.dtype in GGUF_BLOCKS or most.dtype in KEPT:
            return "bf16"
        return "fp8_e4m3fn" if most.dtype in FP8_KINDS else most.dtype

    @cached_property
    def _most(self) -> Entry:
        """An entry of the storage format that most values have."""
        sizes: Counter[tuple[str, bool]] = Counter()
        examples: dict[tuple[str, bool], Entry] = {}
        for entry in self.entries.values():
            storage = entry.dtype, entry.scale is not None
            sizes[storage] += math.prod(entry.shape)
            examples.setdefault(storage, entry)
        return examples[max(sizes, key=lambda storage: sizes[storage])]

    @property
    def original_shapes(self) -> dict[str, tuple[int, ...]]:
        """Key in the family's original layout -> shape, for files of every layout. ComfyUI detects models by shapes."""
        original: dict[str, list[int]] = {}
        for target, source in self.family.file.key_map(self.config).items():
            shape = list(self.shape(target))
            if source.key in original and source.rows is not None:
                original[source.key][0] += shape[0]
            else:
                original[source.key] = shape
        of_nodes = {key: tuple(self.entries[key].shape) for key in self.node_keys}
        computed = dict(self.family.file.computed(self.config))
        return {key: tuple(shape) for key, shape in original.items()} | computed | of_nodes

    @property
    def node_keys(self) -> list[str]:
        """Those of the family's `node_tensors` that the file has."""
        return [key for key in self.family.node_tensors if key in self.entries]

    def check_degrees(self, degrees: Degrees) -> None:
        """Raise ValueError, naming the widget, for degrees that the model does not allow."""
        sizes, config = self.family.sizes, self.config
        check_model(
            degrees,
            heads=sizes.heads(config),
            blocks=self.family.blocks.total(config),
            key_heads=sizes.head_units(config) or None,
            tensor_degrees=self.tensor_degrees,
            file=short(self.path.name),
        )

    @cached_property
    def tensor_degrees(self) -> frozenset[int] | None:
        """The tensor degrees that cut no group of a quantised weight's values apart. None: all, as no weight has groups."""
        sizes, config, plan = self.family.sizes, self.config, self.family.tensor_plan
        cuts = {
            (cut, self.shape(target)[1], entry.kept_layer.unit)
            for target, source in self.key_map.items()
            if (entry := self.entries[source.key]).dtype in KEPT
            and (cut := cut_of(plan, target))
            and cut.kind is CutKind.ROW
        }
        if not cuts:
            return None
        heads, head_size = sizes.heads(config), sizes.head_size(config)
        return frozenset(
            degree
            for degree in range(1, heads + 1)
            if not any(
                span.start % unit or span.stop % unit
                for cut, columns, unit in cuts
                for index in range(degree)
                for span in cut_side(cut, columns, heads, head_size, index, degree)
            )
        )

    def is_enlarged(self, target: str) -> bool:
        """Whether the parameter is larger than in the file."""
        return self.smaller is not None and self.smaller.shape(target) != self.shape(target)

    def shape(self, target: str) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return (source := self.key_map[target]).shape(self.entries[source.key].shape)

    def storage(self, target: str, dtype_name: str) -> str | None:
        """Format in which a rank keeps the weight of a linear layer: of FP8_KINDS, HALF_KINDS, GGUF_BLOCKS or KEPT, or None.

        None: the compute dtype. weight_dtype fp8_e4m3fn rounds all weights to fp8, and int8 the blocks' weights to
        int8_tensorwise, but never the other weights of a quantised file, whose maker left them in full precision.
        `dtype_name`: see core/dtypes.py.
        """
        entry = self.entries[self.key_map[target].key]
        if self.family.stays_float32(self.config, target) or self.is_enlarged(target) or entry.rounded is not None:
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
            return "int8_tensorwise" if target.partition(".")[0] in self.family.blocks.counts(self.config) else None
        return kept if fp8 else None

    def nbytes(self, target: str, dtype_name: str) -> int:
        """Bytes of the whole parameter on a rank. Matrices count as weights of linear layers."""
        shape = self.shape(target)
        storage = self.storage(target, dtype_name) if len(shape) == 2 else None
        if storage in GGUF_BLOCKS:
            values, size = GGUF_BLOCKS[storage]
            return math.prod(shape) // values * size
        if storage in HALF_KINDS:
            return math.prod(shape) * 2
        if storage in KEPT:
            entry = self.entries[self.key_map[target].key]
            scales = {leaf: (tensor.shape, tensor.dtype) for leaf, tensor in entry.scales.items()}
            return quantised_bytes(storage, shape, entry.shape, scales)
        return math.prod(shape) * (
            1 if storage else self.compute_dtype(target, TORCH_DTYPES[compute_name(dtype_name)]).itemsize
        )

    def compute_dtype(self, target: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a model that computes in `dtype` computes this parameter."""
        return torch.float32 if self.family.stays_float32(self.config, target) else dtype


def open_checkpoint(path: str | Path, conversion: Conversion = ()) -> Checkpoint:
    """Open a file, and hold it to the class that computes it (class_check.py).

    ValueError, with a text for the user that names the file, if it is no model that can be run.
    """
    checkpoint = open_checked(path, conversion)
    with refusals(checkpoint.path):
        check_class(
            short(checkpoint.path.name), checkpoint.family, checkpoint.config, checkpoint.key_map, checkpoint.entries
        )
    return checkpoint


def open_checked(path: str | Path, conversion: Conversion = ()) -> Checkpoint:
    """As `open_checkpoint`, for a file that another process has held to its class already."""
    path = Path(path)
    with refusals(path):
        checkpoint = _open_single_file(path, conversion)
        return replace(checkpoint, file_state=file_state(entry.file for entry in checkpoint.entries.values()))


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Context whose errors become a ValueError that names the file, in a line of at most MAX_REFUSAL characters.

    Their causes are left out: whoever logs an error logs its causes, with all that the file has put into them.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, AssertionError, RecursionError) as error:
        name, said = short(path.name), str(error)
        if not isinstance(error, ValueError) or not said.startswith(NAMED):
            said = (
                f"{name} does not match its tensor names: its tensors or settings do not fit each other "
                f"({type(error).__name__}: {short(said)})."
            )
        said = said.removeprefix(NAMED) if name in said else f"{name}: {said.removeprefix(NAMED)}"
        kind = UnknownModel if isinstance(error, UnknownModel) else ValueError
        raise kind(NAMED + short(said, MAX_REFUSAL)).with_traceback(error.__traceback__) from None


def _open_single_file(path: Path, conversion: Conversion) -> Checkpoint:
    entries, read, attention = entries_of(path, conversion)
    stated_config = read or {}
    shapes = {key: entry.shape for key, entry in entries.items()}
    candidates = [family for family in FAMILIES.values() if family.file.detect(shapes)]
    if read is None and any(family.file.header is not None for family in candidates):
        raise ValueError(
            f"model_name: {short(path.name)} has a header whose field config is not JSON of a {candidates[0].name}. "
            "ComfyUI cannot read it either. Get the file from another source."
        )
    family = next((family for family in candidates if family.file.takes_header(stated_config)), None)
    if family is None:
        raise UnknownModel(unknown(short(path.name), entries))
    config = configured(path, family, entries, stated_config)
    key_map = family.file.key_map(config)
    opened = Checkpoint(path, family, config, key_map, entries, stated_config, attention=attention, conversion=conversion)
    return checked(opened)


def configured(path: Path, family: Family, entries: dict[str, Entry], stated: dict[str, Any]) -> dict[str, Any]:
    """The configuration that the tensors' shapes show. ValueError if the header's (`stated`) is another."""
    try:
        config = family.file.configure({key: entry.shape for key, entry in entries.items()})
    except KeyError as missing:
        raise ValueError(f"model_name: {short(path.name)} looks like {family.name}, but lacks {short(missing)}.") from None
    check_stated(short(path.name), family, config, stated)
    return config


def checked(checkpoint: Checkpoint, sized: bool = True) -> Checkpoint:
    """The checkpoint with the tensors that nothing uses in `unused`. ValueError for a missing or unreadable tensor, for an
    unused scale of 8-bit values, and, if `sized`, for sizes that do not fit the tensors."""
    name, entries = short(checkpoint.path.name), checkpoint.entries
    missing = [source.key for source in checkpoint.key_map.values() if source.key not in entries]
    if missing:
        raise ValueError(
            f"model_name: {name} lacks {short(missing[0])}" + f" and {len(missing) - 1} more." * (len(missing) > 1)
        )
    of_nodes = {key: Source(key) for key in checkpoint.node_keys}
    used = {source.key for source in checkpoint.key_map.values()} | of_nodes.keys()
    ignored = checkpoint.family.file.ignored
    used_or_not = used | checkpoint.family.file.computed(checkpoint.config).keys()
    unused = {
        key: entry
        for key, entry in entries.items()
        if key not in used_or_not and not any(re.fullmatch(each, key) for each in ignored)
    }
    if refused := [key for key in unused if _scales_values(key, entries)]:
        raise ValueError(
            f"model_name: {name} has {short(refused[0])}{f' and {len(refused) - 1} more' * (len(refused) > 1)}, which "
            f"{checkpoint.family.name} does not use. It is not loaded, because the image would be wrong."
        )
    for target, source in (checkpoint.key_map | of_nodes).items():
        shape, dtype = entries[source.key].shape, entries[source.key].dtype
        if source.rows is not None and source.rows.stop > (rows := shape[0] if shape else 0):
            raise ValueError(f"model_name: {name}: {short(source.key)} has {rows} rows, too few for {target}.")
        if entries[source.key].lacks_scale:
            raise ValueError(
                f"model_name: {name} has scaled weights, but lacks the scale of {short(source.key)}. The file is "
                "damaged, or its conversion was stopped. Use another copy."
            )
        if 0 in shape:
            raise ValueError(
                f"model_name: {name} has {short(source.key)} of shape {short(list(shape))}, which has no values."
            )
        if dtype not in READABLE:
            among = f" Of GGUF's types it can: F32, F16, BF16, {', '.join(GGUF_BLOCKS)}."
            raise ValueError(
                f"model_name: {name} has {short(source.key)} as {short(dtype)}, which this version cannot read."
                + among * (entries[source.key].file.suffix.lower() in GGUF)
            )
    if sized:
        check_sizes(name, checkpoint.family, checkpoint.config, [entry.shape for entry in entries.values()])
    return replace(checkpoint, entries={key: entry for key, entry in entries.items() if key in used}, unused=unused)


def _scales_values(key: str, entries: Mapping[str, Entry]) -> bool:
    """Whether the tensor is a scale beside a weight in 8 bits, whose values mean nothing without it."""
    layer, _, leaf = key.rpartition(".")
    weight = entries.get(f"{layer}.weight")
    return "scale" in leaf and weight is not None and weight.dtype in {*FP8_KINDS, *KEPT}


def to_original(family: Family, config: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """diffusers' state dict, or a part of it -> original key layout: the inverse of the key map."""
    parts: dict[str, list[tuple[Span | None, torch.Tensor]]] = {}
    for target, source in family.file.key_map(config).items():
        if target not in state:
            continue
        parts.setdefault(source.key, []).append((source.rows, state[target]))
    return {
        key: torch.cat([tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0].start if piece[0] else 0)])
        for key, pieces in parts.items()
    }
