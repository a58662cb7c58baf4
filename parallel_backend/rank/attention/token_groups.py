"""Tokens of a video by group: by frame, or by window."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.families.base.blocks import Windows

from .kv_buffer import Piece


@dataclass
class TokenGroups:
    """The groups of the tokens of videos of one size."""

    name: str
    """Of this way to group tokens, in `known`."""
    group_S: torch.Tensor
    """Number of each token's group, in token order. On the host."""
    device: torch.device
    """Target of index tensors."""
    known: dict[Any, Any]
    """Cache of index tensors."""

    def of(self, spans: tuple[Span, ...]) -> list[torch.Tensor]:
        """By group: indices, on the device, among the concatenated tokens of `spans`. Groups may have none."""
        return self._kept(spans, lambda: [to_device(rows, self.device) for rows in self._rows(spans)])

    def with_text(self, pieces: Sequence[Piece], text_tokens: int) -> "GroupsWithText":
        """The same of tokens of the sequence [text, video], with its text in every group.

        `pieces`: rows of tensors, and their places in the sequence.
        """

        def make() -> GroupsWithText:
            of_text = [piece for piece in pieces if piece[1].stop <= text_tokens]
            of_video = [piece for piece in pieces if piece[1].stop > text_tokens]
            text, video = (
                torch.cat([torch.arange(0), *(torch.arange(rows.start, rows.stop) for rows, _ in part)])
                for part in (of_text, of_video)
            )
            groups = [video[rows] for rows in self._rows(tuple(places.shift(-text_tokens) for _, places in of_video))]
            joint = torch.cat([part for group in groups for part in (group, text)])
            return GroupsWithText(
                rows_N=to_device(joint, self.device),
                video_V=to_device(torch.cat(groups), self.device),
                text_T=to_device(text, self.device),
                counts=tuple(map(len, groups)),
            )

        return self._kept((tuple(pieces), text_tokens), make)

    def _rows(self, spans: tuple[Span, ...]) -> list[torch.Tensor]:
        group_s = torch.cat([self.group_S[:0], *(self.group_S[span.slice] for span in spans)])
        counts = torch.bincount(group_s, minlength=int(self.group_S.max()) + 1)
        return list(torch.argsort(group_s, stable=True).split(counts.tolist()))

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if (key := (self.name, key)) not in self.known:
            self.known[key] = make()
        return self.known[key]


@dataclass(frozen=True)
class GroupsWithText:
    """Rows of tensors by group."""

    rows_N: torch.Tensor
    """Group by group: its tokens of the video, then all of the text."""
    video_V: torch.Tensor
    """Group by group: its tokens of the video."""
    text_T: torch.Tensor
    """The text's."""
    counts: tuple[int, ...]
    """Tokens of the video in each group."""

    @cached_property
    def spans(self) -> list[Span]:
        """Of each group in `rows_N`."""
        stops = list(itertools.accumulate((count + len(self.text_T) for count in self.counts), initial=0))
        return [Span(*pair) for pair in itertools.pairwise(stops)]


def frames(grid: tuple[int, ...]) -> torch.Tensor:
    """Frame of each token of a video [N], in the order of frames, rows, columns."""
    return torch.arange(math.prod(grid)) // math.prod(grid[1:])


def windows(grid: tuple[int, ...], spans: Windows) -> torch.Tensor:
    """Window of each token of a video [N], in the order of frames, rows, columns."""
    axes = []
    for size, of_axis in zip(grid, spans, strict=True):
        assert sum(map(len, of_axis)) == size, "windows cover the video once"
        axes.append(torch.cat([torch.full((len(span),), number) for number, span in enumerate(of_axis)]))
    number = axes[0]
    for axis, of_axis in zip(axes[1:], spans[1:], strict=True):
        number = number[..., None] * len(of_axis) + axis
    return number.flatten()
