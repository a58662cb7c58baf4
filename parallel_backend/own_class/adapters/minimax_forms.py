"""MiniMax H3's model and blocks in a form that ranks can cut, and the segments of its sequence."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallel_backend.core.sparse_attention import REST, SOUND, VIDEO, Runs
from parallel_backend.own_class.cuts.attention_calls import module_global
from parallel_backend.own_class.cuts.forms import Form

INSIDE = "parallel_dit_inside"
"""Argument that makes the call skip the class's `forward` and run `_forward`: other nodes' wrappers have run `forward`
already."""
GATE = "attn.to_gate_compress"
"""Layer of FastH3's blocks that only video sparse attention (VSA) reads."""
KINDS = {"video": VIDEO, "audio": SOUND}
"""The class's name of a segment -> our kind of segment."""


def minimax_h3_segments(
    latents: Sequence[torch.Tensor], arguments: Mapping[str, Any], native: Any
) -> tuple[Runs, tuple[int, ...]]:
    """Return (segments, grid) as in adapters.Adapter.segments, from the class's own layout of the call."""
    video, sound = latents
    frames, *sides = video.shape[2:]
    height, width = (side + side % 2 for side in sides)  # filled up to whole tokens
    sizes = arguments["context"].shape[1], frames, height, width, sound.shape[-1]
    payload = arguments.get("minimax_payload") or {}
    layout = payload.get("layout")
    if layout is None or layout.signature != sizes:
        made = module_global(native, "PackedLayout")
        layout = made(*sizes, keyframes=payload.get("keyframes"), refs=payload.get("refs"))
    segments = tuple((stop - start, KINDS.get(kind, REST)) for start, stop, kind in layout.segments)
    return segments, (frames, height // 2, width // 2)


def minimax_h3_arguments(arguments: Mapping[str, Any], _native: Any, _sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments without `layout`, an object that the class can create itself."""
    payload = arguments.get("minimax_payload")
    if not isinstance(payload, dict):
        return dict(arguments)
    return {**arguments, "minimax_payload": {key: value for key, value in payload.items() if key != "layout"}}


class MinimaxH3Model(Form):
    """MiniMax H3's model, which takes INSIDE."""

    def forward(self, *args, **named):
        return self._forward(*args, **named) if named.pop(INSIDE, False) else super().forward(*args, **named)


class MinimaxH3Block(Form):
    """MiniMax H3's block. Tokens [S, D] become [1, S, D]. Runs (start, stop, row of a modulation table) become one row
    number for each token."""

    def __call__(self, x, t_emb, mod_segments, rope_freqs, transformer_options, **more):
        on_device = any(isinstance(row, torch.Tensor) for _, _, row in mod_segments)
        rows_S = rows_of_runs(tuple(mod_segments), x.device if on_device else torch.device("cpu"))
        more["transformer_options"] = transformer_options
        return super().__call__(x[None], t_emb, rows_S, rope_freqs, **more)[0]

    def forward(self, x_BSD, t_emb, rows_S, rope_freqs, **more):
        runs: RowRuns = ((0, len(rows_S), rows_S),)
        if rows_S.device.type == "cpu":  # as the class has it, whose rows are then not repeated for each token
            found = runs_of_rows.__wrapped__ if torch.compiler.is_compiling() else runs_of_rows  # no cache is traced
            runs = found(rows_S)
        return super().forward(x_BSD[0], t_emb, runs, rope_freqs, **more)[None]


RowRuns = tuple[tuple[int, int, Any], ...]
"""(first token, token after the last one, row of a table) for all tokens in order. A tensor has the row of each token."""


@functools.lru_cache(maxsize=4)
def rows_of_runs(runs: RowRuns, device: torch.device) -> torch.Tensor:
    """Return row number of each token, [S] int64. The blocks of a call share the tensor."""
    with torch.inference_mode(False):  # a trial looks at what is written to
        rows_S = torch.empty(runs[-1][1], dtype=torch.long, device=device)
        for start, stop, row in runs:
            rows_S[start:stop] = row
    return rows_S


@functools.lru_cache(maxsize=16)
def runs_of_rows(rows_S: torch.Tensor) -> RowRuns:
    """Return the inverse of `rows_of_runs`, cached by tensor. The tensor's values must not change."""
    values, counts = torch.unique_consecutive(rows_S, return_counts=True)
    ends = counts.cumsum(0)
    return tuple(zip((ends - counts).tolist(), ends.tolist(), values.tolist(), strict=True))
