"""A VAE's decoder or encoder on ranks, as the nodes use it: latents or pixels go to the ranks in bands, piece by piece."""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from parallel_backend.core.devices import device_kind
from parallel_backend.core.spans import Span, in_proportion, split
from parallel_backend.processes.pool import Poll, RankError, wait_for
from parallel_backend.processes.pool_part import SomeRanks
from parallel_backend.vaes import VAES
from parallel_backend.vaes.base import Part, Piece, Weights
from parallel_backend.wire import messages as m
from parallel_backend.wire.shared_memory import ALIGNMENT

from .shared_tensors import shared_weights

IN_FLIGHT = 2
"""Pieces that are under way: the next one is on the ranks when they finish one."""


class TooLittleMemory(RuntimeError):
    """A device has too little memory for its bands. Nothing was computed, and the ranks are as before.

    `missing`: bytes that each device lacks.
    """

    def __init__(self, text: str, missing: Mapping[str, int]):
        super().__init__(text)
        self.missing = missing


@dataclass
class RemoteVAE:
    """One part of a VAE on the ranks of `pool`."""

    pool: SomeRanks
    name: str
    """Name of the weights. Ranks that have weights of this name are not sent them again."""
    kind: str
    """Key of vaes.VAES."""
    part: Part
    weights: Callable[[], Weights]
    """Gives the weights in the dtype to compute in. Called only if ranks lack them."""
    make_room: Callable[[int], None] = lambda nbytes: None
    """Called before weights are sent, with the bytes of one copy and of one rank's band."""
    bytes_sent: list[dict[str, int]] = field(default_factory=list)
    """By rank and mesh axis, bytes that were sent to other ranks for the last picture."""

    def run(
        self,
        x: torch.Tensor,
        scale: int,
        output: torch.Tensor,
        poll: Poll,
        *,
        shared: bool = False,
        bytes_needed: int = 0,
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill `output` [B, C', (frames',) rows', columns'] from x [B, C, (frames,) rows, columns]. Exact up to rounding.

        `scale`: rows of pixels for each row of the latent. `shared`: `output` is in memory that the ranks share
        (shared_tensors.py), and they write into it. `bytes_needed`: for one rank's band; TooLittleMemory if a device has
        less. `on_piece` is called after each of `pieces`. If `poll` raises, the ranks finish at most IN_FLIGHT pieces.
        """
        columns = cut_along_columns(x)
        unit = scale if self.part == "encoder" else 1
        dim = x.ndim - 1 if columns else x.ndim - 2
        sizes = tuple(len(span) * unit for span in bands(x, unit, len(self.pool.devices)))
        assert min(sizes) > 0, "a rank would have no rows"
        pieces = self._pieces(x)
        shared = shared and output.storage_offset() * output.itemsize % ALIGNMENT == 0
        frame = 0

        def requests() -> Iterator[list[m.RunVAE]]:
            begin = 0
            for index, piece in enumerate(pieces):
                part = x.narrow(2, piece.frames.start, len(piece.frames)) if x.ndim == 5 else x
                yield [
                    m.RunVAE(self.part, band.contiguous(), sizes, columns, index == 0, output if shared else None, begin)
                    for band in part.split(sizes, dim)
                ]
                begin += piece.output

        with contextlib.closing(self._replies(requests(), bytes_needed, poll)) as replies:
            for piece, parts in zip(pieces, replies, strict=True):
                target = output.narrow(2, frame, piece.output) if x.ndim == 5 else output
                for span, reply in zip(in_proportion(sizes, output.shape[dim]), parts, strict=True):
                    if not shared:
                        self._take(target.narrow(dim, span.start, len(span)), reply)
                frame += piece.output
                on_piece()

    def run_tiles(
        self, clips: Iterable[torch.Tensor], poll: Poll, bytes_needed: int = 0
    ) -> Generator[torch.Tensor, None, None]:
        """The outputs of each clip's tiles [tiles, C, frames, rows, columns], in order. Ranks share the tiles."""
        ranks = len(self.pool.devices)

        def requests() -> Iterator[list[m.RunVAE]]:
            for tiles in clips:
                shares = [tiles[span.slice].contiguous() for span in split(Span(0, len(tiles)), ranks)]
                yield [m.RunVAE(self.part, share, (), False, True, None, 0) for share in shares]

        with contextlib.closing(self._replies(requests(), bytes_needed, poll)) as replies:
            for parts in replies:
                outputs = [self._band(reply) for reply in parts]
                yield torch.cat([output for output in outputs if output.numel()])

    def shape(self, x: torch.Tensor, scale: int, channels: int) -> tuple[int, ...]:
        """Shape of the output of `run`, [B, C', (frames',) rows', columns']. `channels`: C'."""
        rows, columns = (size * scale if self.part == "decoder" else size // scale for size in (x.shape[-2], x.shape[-1]))
        frames = [sum(piece.output for piece in self._pieces(x))] if x.ndim == 5 else []
        return (x.shape[0], channels, *frames, rows, columns)

    def pieces(self, x: torch.Tensor) -> int:
        """Number of pieces in which x goes through."""
        return len(self._pieces(x))

    def _pieces(self, x: torch.Tensor) -> tuple[Piece, ...]:
        return VAES[self.kind].pieces(self.part, x.shape[2] if x.ndim == 5 else 1)

    def _take(self, target: torch.Tensor, reply: m.VAEOutput) -> None:
        """Copy a rank's band into `target`. RankError for a band of another shape."""
        band = self._band(reply)
        if band.shape != target.shape:
            shapes = f"{list(band.shape)} for {list(target.shape)}"
            raise self.pool.refuse(reply.rank, f"a band of a picture of the shape {shapes}")
        target.copy_(band)

    def _band(self, reply: m.VAEOutput) -> torch.Tensor:
        """The band that a rank sent. RankError for a rank that sent none."""
        if reply.band is None:
            raise self.pool.refuse(reply.rank, "None for a band of a picture")
        return reply.band

    def _replies(
        self, requests: Iterator[list[m.RunVAE]], bytes_needed: int, poll: Poll
    ) -> Generator[list[m.VAEOutput], None, None]:
        """The ranks' answers to each request, of which IN_FLIGHT are under way at a time."""
        self._begin(bytes_needed, poll)
        self.bytes_sent = [{} for _ in self.pool.devices]
        pending: deque = deque()
        try:
            for messages in requests:
                pending.append(self.pool.ask_each(messages, m.VAEOutput))
                if len(pending) == IN_FLIGHT:
                    yield self._counted(wait_for(pending.popleft(), poll))
            while pending:
                yield self._counted(wait_for(pending.popleft(), poll))
        finally:
            with contextlib.suppress(RankError):  # failed ranks keep nothing
                self.pool.tell(m.EndVAE(self.part))

    def _counted(self, parts: list[m.VAEOutput]) -> list[m.VAEOutput]:
        for part, total in zip(parts, self.bytes_sent, strict=True):
            for axis, count in part.bytes_sent.items():
                total[axis] = total.get(axis, 0) + count
        return parts

    def _begin(self, bytes_needed: int, poll: Poll) -> None:
        wait_for(self.pool.ready, poll)
        replies = self._asked(bytes_needed, 0, poll)
        if any(reply.short_of_memory for reply in replies):
            self.pool.tell(m.DropVAE(keep=self.part))
            replies = self._asked(bytes_needed, 0, poll)
        if not all(reply.held for reply in replies):
            weights = self.weights()
            self._make_room_for(weights, bytes_needed, poll)
            # Without a look at Cancel between ranks: ranks without weights would not take part in the others' transfers.
            config = json.dumps(weights.config)
            with shared_weights(self.pool, weights.tensors) as tensors:
                # First, so that all ranks with weights of one name have been sent them together.
                self.pool.tell(m.DropVAE(keep="encoder" if self.part == "decoder" else "decoder"))
                self.pool.tell(m.PutVAE(self._held_as, self.kind, self.part, config, tensors, self.pool.part_ranks))
            replies = self._asked(bytes_needed, 0, poll)
        if any(reply.short_of_memory for reply in replies):
            text = f"a device has less than the {bytes_needed / 1e9:.1f} GB that its band needs"
            raise TooLittleMemory(text, self._missing(replies))

    @property
    def _held_as(self) -> str:
        """The name of the weights on the ranks: they are those of bands on just these ranks."""
        return f"{self.name} on {self.pool.part_ranks}" if self.pool.part_ranks else self.name

    def _asked(self, bytes_needed: int, weight_bytes: int, poll: Poll) -> list[m.VAEBegun]:
        """The ranks' replies to BeginVAE. `bytes_needed`: for a rank's band. `weight_bytes`: for one copy of the weights."""
        messages = []
        for rank, device in enumerate(self.pool.devices):
            ranks = self.pool.devices.count(device)
            copies = 1 if device_kind(device) == "cpu" and self.pool.lends_to(rank) else ranks  # see shared_weights
            messages.append(m.BeginVAE(self._held_as, self.part, ranks * bytes_needed, copies * weight_bytes))
        return wait_for(self.pool.ask_each(messages, m.VAEBegun), poll)

    def _make_room_for(self, weights: Weights, bytes_needed: int, poll: Poll) -> None:
        """Make room for weights and bands on the devices; other parts of VAEs leave. TooLittleMemory if that fails."""
        nbytes = sum(tensor.nbytes for tensor in weights.tensors.values())
        self.make_room(nbytes + bytes_needed)
        if not self._missing(self._asked(bytes_needed, nbytes, poll)):
            return
        self.pool.tell(m.DropVAE())
        if missing := self._missing(self._asked(bytes_needed, nbytes, poll)):
            text = f"a device has less than the {(nbytes + bytes_needed) / 1e9:.1f} GB that its part of the VAE needs"
            raise TooLittleMemory(text, missing)

    def _missing(self, replies: Sequence[m.VAEBegun]) -> dict[str, int]:
        """Bytes that each device lacks; devices with enough memory are left out."""
        missing: dict[str, int] = {}
        for device, reply in zip(self.pool.devices, replies, strict=True):
            missing[device] = max(missing.get(device, 0), reply.missing)  # each rank reports for its whole device
        return {device: lacks for device, lacks in missing.items() if lacks}


def cut_along_columns(x: torch.Tensor) -> bool:
    """Whether to cut along columns. Bands along the longer side exchange less, and differ less in size."""
    return x.shape[-1] > x.shape[-2]


def bands(x: torch.Tensor, unit: int, ranks: int) -> tuple[Span, ...]:
    """Each rank's rows of x, or columns, counted in units of `unit` rows that must stay together."""
    return split(Span(0, max(x.shape[-2:]) // unit), ranks)
