"""Splits a class's tokens over sequence ranks (Ulysses, ring) and into bands, inside its blocks only, as a trial has shown.

Prologue and epilogue run with all tokens on every rank. At the first block its streams are cut, and also tensors with a row
for each token, such as rotary tables. Attention exchanges keys. After the last block all ranks' tokens are gathered; other
bands are NaN. Classes cannot run without tokens: a rank without a token of a stream computes one as a stand-in. It attends
to nothing, nothing attends to it, and it is dropped.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.own_class import OwnAttention, OwnBlock, OwnSlice
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.block_arguments import Arguments, TokenAxes, in_rows, tensor_places, token_count
from parallel_backend.own_class.calls.residuals import fitted
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.attention_calls import Attend, AttentionCall, attention_call, call_itself
from parallel_backend.own_class.cuts.band_tokens import BandTokens, Pick, numbers, shift

HOST = torch.device("cpu")
PICKS, LENGTHS = "picks", "lengths"
"""First items of keys of TokenCut.known."""
STAND_IN = Span(0, 1)
"""The token of a stream that is computed if a rank has none of its own."""


def entries_of(blocks: Sequence[OwnBlock]) -> list[set[int]]:
    """Groups of streams that enter the blocks together: at the first block, and each time after tokens were gathered."""
    found: list[set[int]] = [set()]
    for block in blocks:
        found[-1] |= {cut.streams[0] for cut in block.slices if cut.enters}
        if block.leaving:
            found.append(set())
    return [streams for streams in found if streams]


class TokenCut(ABC):
    """Splits the tokens in `blocks`, all blocks of the class in order. `index`: this sequence rank's number."""

    def __init__(self, blocks: Sequence[OwnBlock], index: int, ranks: SequenceCut):
        self.blocks, self.index, self.ranks = list(blocks), index, ranks
        self.number = 0
        """Number of the block that runs."""
        self.attended = 0
        """Number of attention calls in that block so far, including the present one, and those of modules that idle."""
        self.runs_block = False
        """Whether a block runs."""
        self.tokens: dict[int, int] = {}
        """Stream -> its number of tokens, for each stream that has entered."""
        self.alone = False
        """Whether each rank has a patch of naive patches."""
        self.attend_whole: Attend = call_itself
        """Computes attention to keys that are complete on every rank."""
        self.band: BandTokens | None = None
        """The band that the present call computes. None: all tokens."""
        self._stand_ins: set[int] = set()  # streams of this call of which this rank has a stand-in alone
        self._known: dict[Any, Any] = {}  # of calls with the same tokens, see `known`
        self._axes: dict[int, TokenAxes] = {}  # of this call, by a tensor's number of axes
        self._latest: OwnAttention | None = None  # that call in the block that runs whose tokens are cut
        # Of this call: a whole table, and its part.
        self._parts: dict[tuple[int, OwnSlice], tuple[torch.Tensor, torch.Tensor]] = {}
        self._keys: dict[int, tuple[Any, list[int | str] | None]] = {}  # by block: form of its call, see _keys_of

    @abstractmethod
    def exchange(self, spec: OwnAttention, call: AttentionCall, mask_bK: torch.Tensor | None) -> torch.Tensor:
        """Return attention [B, q, H, D] of this rank's queries to all ranks' keys. `mask_bK`: bool, the keys to see, rank by
        rank."""

    @abstractmethod
    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """[B, s, D] -> [B, S, D]: all ranks' tokens of these streams, rank by rank."""

    @property
    def cuts(self) -> bool:
        """Whether tokens of the present call are cut."""
        return True

    @property
    def has_words(self) -> bool:
        """Whether the present call computes tokens other than the image's: text, or a second latent's tokens."""
        return self.band is None or self.band.has_words

    def begin(self) -> None:
        """Begin a call."""
        self.tokens.clear()
        self._stand_ins.clear()
        self._axes.clear()
        self._parts.clear()
        self._known = self.known()

    def known(self) -> dict[Any, Any]:
        """Return the cache of positions and row numbers, for the present call and all others with the same tokens."""
        return {}

    def enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments of block `number`, cut to this rank's tokens."""
        self.number = number
        slices = self.blocks[number].slices
        if (keys := self._keys_of(number, args, kwargs)) is not None:
            positional, named = list(args), dict(kwargs)
            for cut, key in zip(slices, keys, strict=True):
                where: Any = positional if isinstance(key, int) else named
                where[key] = self._with_own_tokens(where[key], cut)
            return tuple(positional), named
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = tensor_places(leaves)
        for cut in slices:
            leaves[places[cut.tensor]] = self._with_own_tokens(leaves[places[cut.tensor]], cut)
        return pytree.tree_unflatten(leaves, structure)

    def _keys_of(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str] | None:
        """Positions and names of the arguments to be cut. None: some are nested. Cached, because the search is slow."""
        form = *map(type, args), *kwargs, *map(type, kwargs.values())
        known, keys = self._keys.get(number, (None, None))
        if known != form:
            leaves = pytree.tree_leaves((args, kwargs))
            places = tensor_places(leaves)
            tensors = [leaves[places[cut.tensor]] for cut in self.blocks[number].slices]
            given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            found = [next((key for key, value in given if value is tensor), None) for tensor in tensors]
            keys = None if None in found or len(set(found)) < len(found) else [key for key in found if key is not None]
            self._keys[number] = form, keys
        return keys

    def _with_own_tokens(self, tensor: torch.Tensor, cut: OwnSlice) -> torch.Tensor:
        """Return this rank's tokens of `tensor`, an argument of the block that runs.

        A stream is cut where it enters, and again after a block with `placed`; otherwise it is cut already. Other tensors,
        such as rotary tables, are cut once for each call.
        """
        if not cut.enters:
            key = id(tensor), cut  # blocks share tables
            if key not in self._parts:
                self._parts[key] = tensor, self.part(tensor, cut)
            return self._parts[key][1]
        if cut.streams[0] in self.tokens:
            return self.part(tensor, cut).clone() if self.blocks[self.number - 1].placed else tensor
        self.tokens[cut.streams[0]] = token_count(tensor.shape, cut)
        if self.tokens[cut.streams[0]] and not self.lengths(cut.streams)[self.index]:
            self._stand_ins.add(cut.streams[0])
        if cut.axes > 1:
            self._axes[tensor.ndim] = TokenAxes(cut, tensor.shape[cut.axis : cut.axis + cut.axes])
        # A copy: the class may write into the stream, and read the whole one behind its blocks.
        return self.part(tensor, cut).clone()

    def part(self, tensor: torch.Tensor, cut: OwnSlice) -> torch.Tensor:
        """This rank's tokens of a tensor with all tokens. Raises Unproven if the tensor has another number of them."""
        tokens = sum(self.tokens[stream] for stream in cut.streams)
        if token_count(tensor.shape, cut) != tokens:
            raise Unproven(f"an argument of {self.block.name} has {token_count(tensor.shape, cut)} rows, not {tokens}")
        tensor = tensor.flatten(cut.axis, cut.axis + cut.axes - 1)
        parts = [
            tensor.narrow(cut.axis, pick.start, len(pick))
            if isinstance(pick, Span)
            else tensor.index_select(cut.axis, pick.to(tensor.device))  # forms have tables in host memory, too
            for pick in self._computed(cut.streams)
        ]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, dim=cut.axis)
        return part if cut.axes == 1 else part.unflatten(cut.axis, (*(1,) * (cut.axes - 1), -1))

    def rows_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value as [B, S, D]. It may have several axes of tokens, such as rows and columns, like the stream that
        entered."""
        return in_rows(value, self._axes[value.ndim].cut) if value.ndim in self._axes else value

    def of_rows(self, rows_BSD: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `rows_of`: rows with the same axes of tokens as `like`."""
        return self._axes[like.ndim].of_rows(rows_BSD) if like.ndim in self._axes else rows_BSD

    def residual(self, residual_BND: torch.Tensor, is_cut: bool) -> torch.Tensor:
        """Return the values to add to the latent's tokens. If tokens are cut, only this rank's rows, with zeros for its
        references. Otherwise all rows, with zeros for other bands.

        `residual_BND`: for all of the latent's tokens or for the band's, in the order of bands.
        """
        band = self.band
        if band is None:
            own = self.ranks.parts(Span(0, residual_BND.shape[1]))[self.index] or STAND_IN
            return residual_BND[:, own.slice] if is_cut else residual_BND
        if is_cut:
            own = self.ranks.parts(band.band)[self.index]
            of_rank = residual_BND[:, band.order.images(own).shift(-band.pictures.start).slice]
            if not band.order.references:
                return of_rank
            with_references = of_rank.new_zeros(len(of_rank), len(own), of_rank.shape[2])
            with_references[:, to_device(band.order.picture_rows(own), of_rank.device)] = of_rank
            return with_references
        whole = residual_BND.new_zeros(len(residual_BND), band.order.image, residual_BND.shape[2])
        whole[:, band.picture_numbers] = residual_BND
        return whole

    def residual_of_all(self, residual_BSD: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a residual for all tokens of the latest block. Raises Unproven for several streams."""
        left = max((number for number in range(self.number) if self.blocks[number].leaving), default=-1)
        blocks = self.blocks[left + 1 : self.number + 1]
        streams = tuple({cut.streams[0] for block in blocks for cut in block.slices if cut.enters})
        if len(streams) != 1:
            raise Unproven(f"a control adds to the tokens of {self.block.name}, which come from {len(streams)} streams")
        whole = fitted(residual_BSD, self.tokens[streams[0]])
        return self.part(whole, OwnSlice(0, 1, streams, enters=False))

    @property
    def block(self) -> OwnBlock:
        """The block that runs."""
        return self.blocks[self.number]

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the block that was entered. Raises Unproven if it attends more or less often than in the trial."""
        self.runs_block, self.attended = True, 0
        try:
            out = forward(*args, **kwargs)
            if self.attended < len(self.block.attention):
                raise Unproven(f"{self.block.name} attends less often than in the trial")
            return out
        finally:
            self.runs_block, self._latest = False, None

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces the class's attention function: this rank's queries attend to all ranks' keys. May raise Unproven."""
        if not self.runs_block:
            return self.attend_whole(function, *args, **kwargs)
        if self.attended >= len(self.block.attention):
            raise Unproven(f"{self.block.name} attends more often than in the trial")
        spec = self.block.attention[self.attended]
        self._latest = spec if spec.keys else None
        self.attended += 1
        if not spec.keys:
            return self.attend_whole(function, *args, **kwargs)
        call = attention_call(function, *args, **kwargs)
        queries, keys = self._rows(spec.queries), self._rows(spec.keys)
        if call.q_BQHD.shape[1] != queries or call.k_BKHD.shape[1] != keys:
            raise Unproven(f"{self.block.name} attends to other tokens than in the trial")
        mask = call.key_mask
        if self._stand_ins:
            q_BQHD = self._real(call.q_BQHD, spec.queries)
            k_BKHD, v_BKHD = (self._real(each, spec.keys) for each in (call.k_BKHD, call.v_BKHD))
            call = replace(call, q_BQHD=q_BQHD, k_BKHD=k_BKHD, v_BKHD=v_BKHD)
            if mask is not None and mask.shape[1] == keys:
                mask = self._real(mask, spec.keys)
        out_BQHD = self.exchange(spec, call, None if mask is None else self.mask_of_all(mask, spec.keys))
        return call.result(self._with_stand_ins(out_BQHD, spec.queries))

    def mask_of_all(self, mask_bK: torch.Tensor, streams: tuple[int, ...]) -> torch.Tensor:
        """Return the mask of all keys, rank by rank, from that of this rank's, or of all in the class's order. May raise
        Unproven."""
        if mask_bK.shape[1] == sum(self.tokens[stream] for stream in streams):
            return mask_bK[:, self.all_rows(streams, mask_bK.device)]
        if mask_bK.shape[1] != self.lengths(streams)[self.index]:
            raise Unproven(f"{self.block.name} attends with a mask that has other keys than in the trial")
        return self.gather(mask_bK.to(torch.uint8)[..., None], streams)[..., 0].bool()

    def which_own(self, tokens: Span, rows: int, device: torch.device) -> torch.Tensor | None:
        """[rows] bool: which rows of the latest attention output are `tokens`, if the class numbers them among all ranks'
        tokens. None: it numbers them among this rank's `rows`, or they are not cut. Raises Unproven for other numbers."""
        if self._latest is None or tokens.stop == rows:
            return None
        streams = self._latest.queries
        if tokens.stop != sum(self.tokens[stream] for stream in streams):
            raise Unproven(f"{self.block.name} counts the tokens of its image differently from the trial")
        numbers_s = torch.cat([numbers(pick, device) for pick in self._computed(streams)])
        return (numbers_s >= tokens.start) & (numbers_s < tokens.stop)

    def rows(self, streams: Sequence[int], rank: int, device: torch.device = HOST) -> torch.Tensor:
        """Return the numbers of a rank's rows in a tensor with all tokens of these streams, [n] int64."""
        return torch.cat([numbers(pick, device) for pick in self.picks(streams, rank)])

    def all_rows(self, streams: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the numbers of all ranks' rows, rank by rank, [n] int64."""
        return torch.cat([self.rows(streams, rank, device) for rank in range(self.ranks.size)])

    def picks(self, streams: Sequence[int], rank: int, stand_ins: bool = False) -> list[Pick]:
        """Like `rows`, but consecutive rows are a span, which avoids a copy. `stand_ins`: include this rank's."""
        key = PICKS, tuple(streams), rank, stand_ins
        if key not in self._known:
            found: list[Pick] = []
            start = 0
            for stream in streams:
                own = [STAND_IN] if stand_ins and stream in self._stand_ins else self.parts(stream)[rank]
                found += [shift(pick, start) for pick in own]
                start += self.tokens[stream]
            self._known[key] = found
        return self._known[key]

    def _computed(self, streams: Sequence[int]) -> list[Pick]:
        """Return the rows that this rank computes: its own and stand-ins."""
        return self.picks(streams, self.index, stand_ins=True)

    def _rows(self, streams: tuple[int, ...]) -> int:
        """Return the number of rows of these streams that this rank computes."""
        of_ranks = self.lengths(streams)[self.index]
        return of_ranks + len(self._stand_ins.intersection(streams)) if self._stand_ins else of_ranks

    def _computed_rows(self, streams: Sequence[int]) -> list[int]:
        """Return the number of rows that this rank computes, by stream."""
        return [self._rows((stream,)) for stream in streams]

    def _real(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """[B, s, ...]: this rank's rows of these streams without stand-ins."""
        if self._stand_ins.isdisjoint(streams):
            return value
        parts = zip(streams, value.split(self._computed_rows(streams), dim=1), strict=True)
        return torch.cat([part[:, :0] if stream in self._stand_ins else part for stream, part in parts], dim=1)

    def _with_stand_ins(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """Return the inverse of `_real`. Stand-ins are zero."""
        if self._stand_ins.isdisjoint(streams):
            return value
        lengths = [sum(map(len, self.picks((stream,), self.index))) for stream in streams]
        zero = value.new_zeros(len(value), 1, *value.shape[2:])
        parts = zip(streams, value.split(lengths, dim=1), strict=True)
        return torch.cat([zero if stream in self._stand_ins else part for stream, part in parts], dim=1)

    def parts(self, stream: int) -> list[list[Pick]]:
        """Return each rank's rows of a stream that has entered the blocks."""
        if self.band is None:
            return [[span] for span in self.ranks.parts(Span(0, self.tokens[stream]))]
        return [[part.rows for part in of_rank] for of_rank in self.band.parts(stream, self.tokens, self.ranks)]

    def lengths(self, streams: Sequence[int]) -> tuple[int, ...]:
        """Return the number of tokens of these streams, by rank."""
        key = LENGTHS, tuple(streams)
        if key not in self._known:
            self._known[key] = tuple(sum(map(len, self.picks(streams, rank))) for rank in range(self.ranks.size))
        return self._known[key]

    def leaves(self, number: int) -> bool:
        """Whether the class needs all tokens after block `number`: they are gathered, or the block has `placed`."""
        return bool(self.blocks[number].leaving or self.blocks[number].placed)

    def leave(self, out: Any, is_known: bool = True) -> Any:
        """Return the output of the present block, for which `leaves` is true, in the shape for all tokens. The tokens of all
        ranks are gathered. If the block has `placed`, other ranks' tokens are NaN instead. Not `is_known`: all are NaN."""
        values, streams_of = (out,) if isinstance(out, torch.Tensor) else out, self.block.placed or self.block.leaving
        whole: list[torch.Tensor | None] = []
        for number, (value, streams) in enumerate(zip(values, streams_of, strict=True)):
            rows = None if value is None else self.rows_of(value)
            if rows is not None:
                rows = self.left(number, rows, streams) if is_known else self._unknown(rows, streams)
            whole.append(None if rows is None else self.of_rows(rows, value))
        return whole[0] if isinstance(out, torch.Tensor) else tuple(whole)

    def left(self, _number: int, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """Return all tokens of `value`, which the block returned at position `_number` with this rank's tokens."""
        return self.at_places(value, streams) if self.block.placed else self.whole(value, streams)

    def _unknown(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        tokens = sum(self.tokens[stream] for stream in streams)
        return value.new_full((len(value), tokens, *value.shape[2:]), math.nan)

    def whole(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """All ranks' tokens of these streams, stream by stream. Streams that are local to a rank keep its own tokens."""
        shared = [stream for stream in streams if stream not in self.block.local]
        if not shared:
            return value
        if len(shared) == len(streams):
            return self._gathered(self._real(value, streams), streams)
        parts = self.by_stream(value, streams)
        gathered = self._gathered(torch.cat([self._real(parts[stream], [stream]) for stream in shared], dim=1), shared)
        of_all = gathered.split([self.tokens[stream] for stream in shared], dim=1)
        parts |= dict(zip(shared, of_all, strict=True))
        return torch.cat([parts[stream] for stream in streams], dim=1)

    def by_stream(self, value: torch.Tensor, streams: Sequence[int]) -> dict[int, torch.Tensor]:
        """`value` split by stream. It has this rank's tokens of these streams, one stream after the other."""
        return dict(zip(streams, value.split(self._computed_rows(streams), dim=1), strict=True))

    def _gathered(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """Return all ranks' tokens of these streams, stream by stream."""
        gathered = self.gather(value, streams)
        if self.band is not None:
            return self.among_all(gathered, streams)
        if len(streams) == 1:
            return gathered
        # By rank, and by stream within it -> by stream, and by rank within it.
        by_stream = [list(map(len, self.ranks.parts(Span(0, self.tokens[stream])))) for stream in streams]
        parts = iter(gathered.split([length for of_rank in zip(*by_stream, strict=True) for length in of_rank], dim=1))
        of_ranks = [[next(parts) for _ in streams] for _ in range(self.ranks.size)]
        return torch.cat([part for of_stream in zip(*of_ranks, strict=True) for part in of_stream], dim=1)

    def among_all(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """All tokens of these streams, with NaN for other bands. `value`: all ranks' tokens of a band, rank by rank."""
        out = self._unknown(value, streams)
        out[:, self.all_rows(streams, value.device)] = value
        return out

    def at_places(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """Return all tokens of these streams, with NaN for other ranks. A value without streams is returned as it is."""
        if not streams:
            return value
        out = self._unknown(value, streams)
        out[:, self.rows(streams, self.index, value.device)] = self._real(value, streams)
        return out
