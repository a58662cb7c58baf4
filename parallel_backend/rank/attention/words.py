"""Stored keys and values of steady text (OwnLatent.steady), which later calls outside of runs read again."""

from dataclasses import dataclass, field

import torch

from parallel_backend.core.spans import Span

from .kv_buffer import Piece


@dataclass(frozen=True)
class WordKeys:
    """Layer -> keys and values of the text, for one conditioning with `batch` entries on this rank. The tensors never move,
    so a CUDA graph can read them."""

    batch: int
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """[batch, T, H, D] each, of the H heads that the rank attends with."""

    @property
    def nbytes(self) -> int:
        return sum(x_BTHD.nbytes for both in self.layers.values() for x_BTHD in both)

    def update(
        self,
        layer: int,
        k_bshD: torch.Tensor,
        v_bshD: torch.Tensor,
        pieces: list[Piece],
        entries: Span,
        words: int,
        heads: Span,
        of_rank: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the text's keys if they are among these rows; otherwise put the stored ones in front.

        Returns all keys and values, text first, [b, words + n, h, D] each. `pieces`: (rows, their positions). `words`:
        number of text tokens. `heads`: which of the rank's `of_rank` heads the tensors have."""
        if layer not in self.layers:
            shape = (self.batch, words, of_rank, k_bshD.shape[-1])
            self.layers[layer] = k_bshD.new_empty(shape), v_bshD.new_empty(shape)
        are_new = any(positions.start < words for _, positions in pieces)
        stop = max(positions.stop for _, positions in pieces)
        k_bKhD, v_bKhD = (
            self._with(kept_BTHD[entries.slice, :, heads.slice], x_bshD, pieces, stop, are_new)
            for kept_BTHD, x_bshD in zip(self.layers[layer], (k_bshD, v_bshD), strict=True)
        )
        return k_bKhD, v_bKhD

    @staticmethod
    def _with(kept_bThD: torch.Tensor, x_bshD: torch.Tensor, pieces: list[Piece], stop: int, are_new: bool) -> torch.Tensor:
        words = kept_bThD.shape[1]
        out_bKhD = x_bshD.new_empty(len(x_bshD), stop, *x_bshD.shape[2:])
        for rows, positions in pieces:
            out_bKhD[:, positions.slice] = x_bshD[:, rows.slice]
        if are_new:
            kept_bThD.copy_(out_bKhD[:, :words])
        else:
            out_bKhD[:, :words] = kept_bThD
        return out_bKhD
