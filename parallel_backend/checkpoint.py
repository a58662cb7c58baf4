"""Checkpoints on disk: which family one is, and any rank's own part of it, read through a memory map.

Read: single-file safetensors in original (ComfyUI) key layout, with or without the `model.diffusion_model.` prefix, and
diffusers folders (config.json, one or several safetensors files). Opening reads headers only.
"""

import inspect
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .families import FAMILIES, Family
from .families.base import Source
from .layout import Shard, Span

PREFIXES = ("model.diffusion_model.", "")
SCALE_SUFFIXES = (".scale_weight", ".weight_scale", ".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""Endings of the keys with which quantised files carry their scales; without them the weights are garbage."""

_SAFETENSORS_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8_e4m3fn", "F8_E5M2": "fp8_e5m2"}


@dataclass(frozen=True)
class Entry:
    """A tensor on disk, known from its file's header."""

    file: Path
    key: str  # in the file, prefix included
    shape: tuple[int, ...]
    dtype: str  # fp32, bf16, fp16, fp8_e4m3fn, or safetensors' own name


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint of a known family. `recipe`: the model's parameter name -> where its values are."""

    path: Path
    family: Family
    config: dict[str, Any]
    recipe: dict[str, Source]
    entries: dict[str, Entry] = field(repr=False)

    @property
    def dtype(self) -> str:
        """The dtype of most of the values."""
        sizes: dict[str, int] = {}
        for entry in self.entries.values():
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + _numel(entry.shape)
        return max(sizes, key=sizes.get)

    @property
    def original_shapes(self) -> dict[str, tuple[int, ...]]:
        """Key in the family's original layout -> shape, whatever layout the file has. ComfyUI detects models by these."""
        original: dict[str, list[int]] = {}
        for target, source in self.family.recipe(self.config).items():
            shape = list(self.shape(target))
            if source.key in original and source.rows is not None:
                original[source.key][0] += shape[0]
            else:
                original[source.key] = shape
        return {key: tuple(shape) for key, shape in original.items()}

    def shape(self, target: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        source = self.recipe[target]
        shape = self.entries[source.key].shape
        return shape if source.rows is None else (len(source.rows), *shape[1:])

    def read(
        self, targets: dict[str, torch.dtype], shards: dict[str, Shard], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The values of these parameters, in these dtypes, from the mapped files; of those in `shards` only that part.

        Only what is needed is copied.
        """
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in {self.entries[self.recipe[target].key].file for target in targets}
            }
            return {
                target: self._read_one(files, target, shards.get(target), dtype, device) for target, dtype in targets.items()
            }

    def _read_one(
        self, files: dict[Path, Any], target: str, shard: Shard | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        source = self.recipe[target]
        entry = self.entries[source.key]
        part = files[entry.file].get_slice(entry.key)
        if shard is None:
            shard = Shard(0, (Span(0, self.shape(target)[0]),))
        spans = list(shard.spans)
        if source.swap_halves:
            assert shard.dim == 0
            half = self.shape(target)[0] // 2
            spans = [piece.shift(by) for span in spans for piece, by in _halves(span, half)]
        # Every piece goes straight from the mapped file to its place: a copy in between would leave holes in the heap,
        # which the process keeps after the weights are gone.
        out = torch.empty(_resized(self.shape(target), shard), dtype=dtype, device=device)
        first = 0 if source.rows is None else source.rows.start
        rows = slice(first, first + self.shape(target)[0])
        for span, place in zip(spans, out.split([len(span) for span in spans], dim=shard.dim), strict=True):
            place.copy_(part[span.shift(first).slice] if shard.dim == 0 else part[rows, span.slice])
        return out


def _resized(shape: tuple[int, ...], shard: Shard) -> list[int]:
    return [sum(map(len, shard.spans)) if dim == shard.dim else size for dim, size in enumerate(shape)]


def _halves(span: Span, half: int) -> list[tuple[Span, int]]:
    """The parts of `span` below and from `half` on, each with the way to its place when the halves are exchanged."""
    parts = (
        (Span(min(span.start, half), min(span.stop, half)), half),
        (Span(max(span.start, half), max(span.stop, half)), -half),
    )
    return [(part, by) for part, by in parts if len(part)]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a file or a diffusers folder. ValueError, in the user's words, for whatever is not a model that can be run."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"model_name: {path.name} does not exist at {path.parent}.")
    return _open_folder(path) if path.is_dir() else _open_single_file(path)


def _open_single_file(path: Path) -> Checkpoint:
    if path.suffix != ".safetensors":
        raise ValueError(f"model_name: {path.name} is not a .safetensors file; pickled checkpoints are never opened.")
    entries = _read_header(path)
    prefix = next(prefix for prefix in PREFIXES if prefix == "" or any(key.startswith(prefix) for key in entries))
    entries = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
    _refuse_scales(path, entries)
    family = next((f for f in FAMILIES.values() if f.detect({k: e.shape for k, e in entries.items()})), None)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"model_name: {path.name} is no diffusion transformer that this version knows ({known}). Its first keys: "
            f"{', '.join(list(entries)[:3]) or 'none'}."
        )
    for ending, usual in family.key_aliases.items():
        entries = {key.removesuffix(ending) + usual if key.endswith(ending) else key: e for key, e in entries.items()}
    config = _configure(path, family, entries)
    return _checked(Checkpoint(path, family, config, family.recipe(config), entries))


def _configure(path: Path, family: Family, entries: dict[str, Entry]) -> dict[str, Any]:
    try:
        return family.configure({key: entry.shape for key, entry in entries.items()})
    except KeyError as missing:
        raise ValueError(f"model_name: {path.name} looks like {family.name}, but lacks {missing}.") from missing


def _open_folder(path: Path) -> Checkpoint:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model_name: the folder {path.name} has no readable config.json of a diffusers model.") from error
    kind = config.get("_class_name") if isinstance(config, dict) else None
    family = next((f for f in FAMILIES.values() if f.model_class == kind), None)
    if family is None:
        raise ValueError(f"model_name: {path.name} is a {kind}, which this version does not know.")
    entries: dict[str, Entry] = {}
    for file in sorted(path.glob("*.safetensors")):
        entries.update(_read_header(file))
    _refuse_scales(path, entries)
    config = _constructor_arguments(family, config)
    recipe = {target: Source(target) for target in family.recipe(config)}
    return _checked(Checkpoint(path, family, config, recipe, entries))


def _constructor_arguments(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says and, where it is silent, the class's defaults."""
    import diffusers  # takes seconds, and ComfyUI's process can do without it for single files

    parameters = inspect.signature(getattr(diffusers, family.model_class).__init__).parameters
    return {name: config.get(name, p.default) for name, p in parameters.items() if name != "self"}


def _read_header(path: Path) -> dict[str, Entry]:
    try:
        with safe_open(path, framework="pt") as file:
            keys = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
            return {
                key: Entry(path, key, tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype()))
                for key, part in keys.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model_name: {path.name} cannot be read; it is damaged or incomplete ({error}).") from error


def _refuse_scales(path: Path, entries: dict[str, Entry]) -> None:
    scales = [key for key in entries if key.endswith(SCALE_SUFFIXES)]
    if scales:
        raise ValueError(
            f"model_name: {path.name} holds scaled weights ({scales[0]} and {len(scales) - 1} more), which this version "
            "cannot expand. Use the plain fp8, bf16 or fp16 file of the model."
        )


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """Every parameter has its values, and every tensor of the file its use."""
    name, entries = checkpoint.path.name, checkpoint.entries
    missing = [source.key for source in checkpoint.recipe.values() if source.key not in entries]
    if missing:
        raise ValueError(f"model_name: {name} lacks {missing[0]}" + f" and {len(missing) - 1} more." * (len(missing) > 1))
    used = {source.key for source in checkpoint.recipe.values()}
    surplus = [key for key in entries if key not in used]
    if surplus:
        raise ValueError(
            f"model_name: {name} holds {surplus[0]}{f' and {len(surplus) - 1} more' * (len(surplus) > 1)}, for which "
            f"{checkpoint.family.name} has no use: not loaded, since the picture would be wrong."
        )
    for target, source in checkpoint.recipe.items():
        shape = entries[source.key].shape
        if source.rows is not None and source.rows.stop > shape[0]:
            raise ValueError(f"model_name: {name}: {source.key} has {shape[0]} rows, too few for {target}.")
    return checkpoint


def to_original(family: Family, config: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """diffusers state dict -> original key layout: the recipe run backwards."""
    parts: dict[str, list[tuple[Span | None, torch.Tensor]]] = {}
    for target, source in family.recipe(config).items():
        tensor = torch.cat(state[target].chunk(2)[::-1]) if source.swap_halves else state[target]
        parts.setdefault(source.key, []).append((source.rows, tensor))
    return {
        key: torch.cat([tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0].start if piece[0] else 0)])
        for key, pieces in parts.items()
    }


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
