"""Entries of a file in diffusers' layout under the names of ComfyUI's layout, whose tensors may be rows of several."""

from collections.abc import Mapping
from dataclasses import replace

from parallel_backend.core.setup import Conversion
from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span

from .tensor_files import Entry


def convert(name: str, entries: Mapping[str, Entry], conversion: Conversion) -> dict[str, Entry]:
    """`entries` of file `name` by their names in ComfyUI's layout. What the conversion leaves out keeps its name.

    ValueError for rows of tensors that do not fit each other, or that are packed with scales.
    """
    converted = {key: _joined(name, key, [(entries[each], Span(*span)) for each, *span in rows]) for key, rows in conversion}
    used = {each for _, rows in conversion for each, *_ in rows}
    return {key: entry for key, entry in entries.items() if key not in used} | converted


def _joined(name: str, key: str, pieces: list[tuple[Entry, Span]]) -> Entry:
    first = pieces[0][0]
    if len(pieces) == 1 and (not first.shape or pieces[0][1] == Span(0, first.shape[0])):
        return first
    kinds = {(piece.dtype, piece.shape[1:]) for piece, _ in pieces}
    if len(kinds) > 1 or any(piece.scales or piece.layer or piece.lacks_scale for piece, _ in pieces):
        raise ValueError(
            f"model_name: {name} has {short(first.key)} in a diffusers layout that cannot be converted to {short(key)}. "
            "Use the file in ComfyUI's layout."
        )
    shape = (sum(len(span) for _, span in pieces), *first.shape[1:])
    return replace(first, key=key, shape=shape, pieces=tuple(pieces))
