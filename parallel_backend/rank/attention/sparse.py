"""Block-sparse attention on a rank: the whole sequence for the rank's heads, in ComfyUI's order of tokens.

The keys that a query block sees depend on how tokens fall into blocks of 64. So the rows of all ranks are first brought into
the order of ComfyUI's sequence. Heads are independent: under Ulysses and tensor parallelism each rank computes what one
device computes for the same heads.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.sparse_attention import HEAD_SIZE, KEYS_AND_ROWS, SOUND, VIDEO, SparseAttention

BLOCK = 64
"""Tokens of a block of queries or keys."""
CUBE = (4, 4, 4)
"""Frames, rows and columns of one block of VSA, whose tokens are in this order."""


def refusal(device: torch.device, dtype: torch.dtype, head_size: int, cubes: bool) -> str:
    """Return why ComfyUI would use dense attention for such tensors, as text for the report. Empty: it would not."""
    try:
        import comfy_kitchen

        there = comfy_kitchen.sol_attn_is_available(device)
    except (ImportError, AttributeError):  # a release without it
        there = False
    if not there:
        return "comfy-kitchen's kernel, which this device or the installed release does not have"
    if head_size != HEAD_SIZE:
        return f"heads of {HEAD_SIZE}, not {head_size}"
    if cubes and dtype != torch.bfloat16:
        return "bf16"
    return ""


Places = Callable[[], torch.Tensor]
"""Returns [S] int64: for each row, the number of its token in the class's order."""


@dataclass(frozen=True)
class Layout:
    """The order of blocks: which row of all ranks is at which position. Rows are those after Ulysses' gather, in rank
    order."""

    source_N: torch.Tensor | None
    """[N] int64: row at each position of the blocks; -1: an empty position. None: the rows are in order."""
    place_S: torch.Tensor | None
    """[S] int64: position of each row, the inverse of `source_N`."""
    lengths_n: torch.Tensor | None
    """int32: number of tokens in each block, which come first in it. None: all blocks but the last are full."""
    keys: tuple[int, int] = (0, 0)
    """(first, last + 1) of the blocks of keys that all queries see exactly."""
    rows: tuple[int, int] = (0, 0)
    """(first, last + 1) of the blocks of queries that see all keys."""


@dataclass
class SparseCalls:
    """Counts the calls that have been sparse since the last report."""

    title: str = ""
    sparse: int = 0
    lacked: set[str] = field(default_factory=set)

    def report(self) -> str:
        """Return text for the user. Empty: no call was to be sparse."""
        lacked = sorted(self.lacked)
        if not self.sparse and not lacked:
            return ""
        text = f"block-sparse ({self.title})" if self.sparse else f"in full instead of {self.title}"
        text += f"{', in full where' if self.sparse else ', since'} it needs {', '.join(lacked)}" if lacked else ""
        self.sparse, self.lacked = 0, set()
        return text


class SparseStep:
    """Block-sparse attention of a micro-step that computes a whole call, on no other sequence ranks than Ulysses'."""

    def __init__(self, settings: SparseAttention, device: torch.device):
        self.settings, self._device = settings, device
        self._of_class: dict[tuple[tuple[int, ...], int], Layout | None] = {}

    def of_class(self, streams: tuple[int, ...], place_of_rows: Places | None, tokens: int) -> Layout | None:
        """Return the layout for a layer with this many tokens of these streams. `place_of_rows`: None if rows are in the
        class's order. None for VSA if the kinds of these tokens are unknown."""
        if (key := (streams, tokens)) not in self._of_class:
            self._of_class[key] = self._layout_of_class(place_of_rows, tokens)
        return self._of_class[key]

    def _layout_of_class(self, place_of_rows: Places | None, tokens: int) -> Layout | None:
        lengths, kinds = zip(*self.settings.segments, strict=True) if self.settings.segments else ((), ())
        is_known = sum(lengths) == tokens
        if self.settings.cubes and not is_known:
            return None
        place = torch.arange(tokens) if place_of_rows is None else place_of_rows()
        order = torch.empty_like(place)
        order[place] = torch.arange(tokens)
        if self.settings.cubes:
            return self._in_cubes(kinds, order.split(list(lengths)), tokens)
        return self._in_order(order, *(self._sinks(kinds, lengths) if is_known else ((0, 0), (0, 0))))

    def _in_order(self, order: torch.Tensor, keys: tuple[int, int], rows: tuple[int, int]) -> Layout:
        """Return the layout for a sequence in one piece. `order`: [S], row of each token in the sequence. `keys`, `rows`:
        see Layout."""
        start = len(order)
        if torch.equal(order, torch.arange(start)):
            return Layout(None, None, None, keys, rows)
        place = torch.empty_like(order)
        place[order] = torch.arange(start)
        return Layout(to_device(order, self._device), to_device(place, self._device), None, keys, rows)

    def _sinks(self, kinds: Sequence[str], lengths: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """`Layout.keys` and `rows` as ComfyUI counts them: the blocks of the tokens before the video."""
        starts = dict(zip(kinds, itertools.accumulate(lengths, initial=0), strict=False))
        if not self.settings.sinks or not starts.get(VIDEO):
            return (0, 0), (0, 0)
        keys = 0, -(-starts[VIDEO] // BLOCK)
        if self.settings.sinks != KEYS_AND_ROWS:
            return keys, (0, 0)
        return keys, (starts.get(SOUND, 0) // BLOCK, keys[1])

    def _in_cubes(self, kinds: Sequence[str], runs: Sequence[torch.Tensor], rows: int) -> Layout:
        """Return the layout for VSA: each segment before the video in blocks of its own, then the video's cubes. A block
        begins with its tokens, and the rest of it is empty."""
        blocks, before = [], 0
        for kind, run in zip(kinds, runs, strict=True):
            if kind == VIDEO:
                blocks.append(_cubes(run, self.settings.grid))
                continue
            padded = run.new_full((-(-len(run) // BLOCK) * BLOCK,), -1)
            padded[: len(run)] = run
            blocks.append(padded.view(-1, BLOCK))
            before += len(blocks[-1])
        blocks_nB = torch.cat(blocks)
        source = blocks_nB.flatten()
        place = source.new_empty(rows)
        used = source >= 0
        place[source[used]] = used.nonzero()[:, 0]
        lengths = (blocks_nB >= 0).sum(1).to(torch.int32)
        source, place, lengths = (to_device(each, self._device) for each in (source, place, lengths))
        return Layout(source, place, lengths, (0, before), (0, before))

    def lacks(self, q_BShD: torch.Tensor) -> str:
        """Return why ComfyUI would use dense attention for these queries (see `refusal`). Empty: it would not."""
        return refusal(q_BShD.device, q_BShD.dtype, q_BShD.shape[-1], self.settings.cubes)

    def attend(
        self, layout: Layout, q_BShD, k_BShD, v_BShD, gate_BShD: torch.Tensor | None, scale: float | None
    ) -> torch.Tensor:
        """Return attention [B, S, h, D] in rank order. `gate_BShD`: VSA's factor of summaries, for each token and head.
        None: without."""
        import comfy_kitchen

        settings, dtype = self.settings, q_BShD.dtype
        kernel_dtype = torch.bfloat16 if dtype == torch.float32 and q_BShD.is_cuda else dtype  # as ComfyUI's node
        tensors = (q_BShD, k_BShD, v_BShD) if gate_BShD is None else (q_BShD, k_BShD, v_BShD, gate_BShD)
        q, k, v, *gate = (_placed(x_BShD.to(kernel_dtype), layout) for x_BShD in tensors)
        more: dict[str, Any] = {"coarse_gate": gate[0]} if gate else {}
        if layout.lengths_n is not None:
            more |= {"tail": False, "block_len": layout.lengths_n}
        out_BNhD = comfy_kitchen.sol_attn(
            q,
            k,
            v,
            tau=settings.tau,
            scale=scale,
            sink_blocks=list(layout.keys),
            sink_q=list(layout.rows),
            topk_ratio=settings.kept,
            token_aug=settings.extra_tokens,
            **more,
        )
        return (out_BNhD if layout.place_S is None else out_BNhD[:, layout.place_S]).to(dtype)


def _placed(x_BShD: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the tensor [B, N, h, D] in the order of blocks, with zeros at empty positions."""
    if layout.source_N is None:
        return x_BShD  # the kernel takes strides
    placed_BNhD = x_BShD[:, layout.source_N.clamp_min(0)]
    if layout.lengths_n is not None:
        placed_BNhD *= (layout.source_N >= 0)[:, None, None]
    return placed_BNhD


def _cubes(run: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """[n, BLOCK]: rows of the video's tokens, cube by cube. Positions outside of the video come last, as -1."""
    assert len(run) == math.prod(grid), "cubes are of the whole video"
    sides = [-(-side // edge) * edge for side, edge in zip(grid, CUBE, strict=True)]
    padded = run.new_full(sides, -1)
    padded[: grid[0], : grid[1], : grid[2]] = run.view(grid)
    counts = [side // edge for side, edge in zip(sides, CUBE, strict=True)]
    split = padded.view(counts[0], CUBE[0], counts[1], CUBE[1], counts[2], CUBE[2])
    cubes_nB = split.permute(0, 2, 4, 1, 3, 5).reshape(-1, BLOCK)
    order = torch.argsort((cubes_nB < 0).to(torch.int8), dim=1, stable=True)
    return cubes_nB.gather(1, order)
