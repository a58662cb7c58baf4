"""A VAE's decoder or encoder on ranks, as the nodes use it: latents or pixels are sent to the ranks in bands, or in
tiles."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from parallel_backend.core.spans import Span, in_proportion, split
from parallel_backend.processes.pool import Poll, RankError, wait_for
from parallel_backend.processes.pool_part import SomeRanks
from parallel_backend.wire import messages as m

Part = Literal["decoder", "encoder"]
IN_FLIGHT = 2
"""Number of clips whose tiles are in progress, so that the next clip's tiles are on the ranks when they finish one."""
FRAMES_TRIED = {"decoder": 4, "encoder": 24}
"""Maximum frames of the input with which bands are tried. Some encoders only take multiples of four or eight frames."""


class TooLittleMemory(RuntimeError):
    """A device has too little memory for its bands. Nothing was computed, and the ranks are as before. `missing`: bytes that
    each device lacks."""

    def __init__(self, text: str, missing: Mapping[str, int]):
        super().__init__(text)
        self.missing = missing


class NotExact(RuntimeError):
    """Raised if a trial has shown that bands give a different result than the whole image."""


@dataclass(frozen=True)
class Made:
    """The data from which ranks make a part of a VAE."""

    recipe: str
    """PutVAE.recipe."""
    tensors: dict[str, torch.Tensor]
    """PutVAE.tensors."""


@dataclass
class RemoteVAE:
    """One part of a VAE on the ranks of `pool`."""

    pool: SomeRanks
    name: str
    """Name of the weights. Ranks that have weights of this name are not sent them again."""
    part: Part
    made: Callable[[], Made]
    """Returns the part. Called only if ranks lack it."""
    make_room: Callable[[int], None] = lambda nbytes: None
    """Called before weights are sent, with the bytes of one copy and of one rank's band."""
    bytes_sent: list[dict[str, int]] = field(default_factory=list)
    """For each rank, mesh axis -> bytes sent to other ranks for the last image."""

    def run(
        self,
        x: torch.Tensor,
        unit: int,
        output: torch.Tensor,
        poll: Poll,
        bytes_needed: int = 0,
    ) -> None:
        """Fill `output` [B, C', (frames',) rows', columns'] from x [B, C, (frames,) rows, columns]. Exact up to rounding.

        `unit`: rows of x that must stay together. `bytes_needed`: for one rank's band. Raises TooLittleMemory if a device
        has less, NotExact if the ranks' trial has shown it. If `poll` raises, the ranks finish the image.
        """
        columns = cut_along_columns(x)
        dim = x.ndim - 1 if columns else x.ndim - 2
        sizes = self._sizes(x, unit)
        assert min(sizes) > 0, "a rank would have no rows"
        request = [m.RunVAE(band.contiguous(), sizes, columns) for band in x.split(sizes, dim)]
        with contextlib.closing(self._replies(iter([request]), bytes_needed, poll, self._trial(x, unit))) as replies:
            for span, reply in zip(in_proportion(sizes, output.shape[dim]), next(replies), strict=True):
                self._take(output.narrow(dim, span.start, len(span)), reply)

    def run_tiles(
        self, clips: Iterable[torch.Tensor], poll: Poll, bytes_needed: int = 0
    ) -> Generator[torch.Tensor, None, None]:
        """The outputs of each clip's tiles [tiles, C, frames, rows, columns], in order. Ranks share the tiles."""
        ranks = len(self.pool.devices)

        def requests() -> Iterator[list[m.RunVAE]]:
            for tiles in clips:
                shares = [tiles[span.slice].contiguous() for span in split(Span(0, len(tiles)), ranks)]
                yield [m.RunVAE(share, (), False) for share in shares]

        with contextlib.closing(self._replies(requests(), bytes_needed, poll)) as replies:
            for parts in replies:
                yield torch.cat([reply.band for reply in parts if reply.band.numel()])

    def _sizes(self, x: torch.Tensor, unit: int) -> tuple[int, ...]:
        """Return the number of rows (or columns) of each rank."""
        return tuple(len(span) * unit for span in bands(x, unit, len(self.pool.devices)))

    def _trial(self, x: torch.Tensor, unit: int) -> m.RunVAE:
        """Return the smallest corner of x that can be cut into bands of different sizes."""
        rows, columns = ((len(self.pool.devices) + 1) * unit, 2 * unit)[:: -1 if cut_along_columns(x) else 1]
        corner = x[..., :rows, :columns]
        corner = corner[:, :, : FRAMES_TRIED[self.part]] if x.ndim == 5 else corner
        along_columns = cut_along_columns(corner)
        return m.RunVAE(corner.contiguous(), self._sizes(corner, unit), along_columns)

    def _take(self, target: torch.Tensor, reply: m.VAEOutput) -> None:
        """Copy a rank's band into `target`. Raises RankError for a band of another shape."""
        if reply.band.shape != target.shape:
            shapes = f"{list(reply.band.shape)} for {list(target.shape)}"
            raise self.pool.refuse(reply.rank, f"a band of an image of the shape {shapes}")
        target.copy_(reply.band)

    def _replies(
        self, requests: Iterator[list[m.RunVAE]], bytes_needed: int, poll: Poll, trial: m.RunVAE | None = None
    ) -> Generator[list[m.VAEOutput], None, None]:
        """The ranks' answers to each request. IN_FLIGHT requests are in progress at a time."""
        self._begin(bytes_needed, poll, trial)
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
                self.pool.tell(m.EndVAE())

    def _counted(self, parts: list[m.VAEOutput]) -> list[m.VAEOutput]:
        for part, total in zip(parts, self.bytes_sent, strict=True):
            for axis, count in part.bytes_sent.items():
                total[axis] = total.get(axis, 0) + count
        return parts

    def _begin(self, bytes_needed: int, poll: Poll, trial: m.RunVAE | None) -> None:
        wait_for(self.pool.ready, poll)
        held_as = self._held_as(trial)
        replies = self._asked(held_as, bytes_needed, 0, poll)
        if not all(reply.held for reply in replies):
            made = self.made()
            width = 0 if trial is None else torch.float32.itemsize  # of the trial
            weight_bytes = sum(tensor.numel() * max(width, tensor.itemsize) for tensor in made.tensors.values())
            self.pool.tell(m.DropVAE())
            self.make_room(weight_bytes + bytes_needed)
            self._check_room(self._asked(held_as, bytes_needed, weight_bytes, poll), weight_bytes + bytes_needed)
            # Without a look at Cancel between ranks: ranks without weights would not take part in the others' transfers.
            self.pool.tell(m.PutVAE(held_as, made.recipe, made.tensors, trial, self.pool.part_ranks))
            replies = self._asked(held_as, bytes_needed, 0, poll)
        self._check_room(replies, bytes_needed)
        if why := next(filter(None, (reply.wrong for reply in replies)), ""):
            raise NotExact(f"this VAE cannot be cut: {why}")

    def _held_as(self, trial: m.RunVAE | None) -> str:
        """Return the name by which ranks know the part. It depends on ranks, direction of bands and number of frames.
        `trial`: the trial of bands; None: the part computes tiles, which need no trial."""
        form = "tiles" if trial is None else f"columns {trial.columns}, frames {list(trial.band.shape[2:-2])}"
        return f"{self.part} {self.name} on {self.pool.part_ranks or 'all'}, {form}"

    def _asked(self, held_as: str, bytes_needed: int, weight_bytes: int, poll: Poll) -> list[m.VAEBegun]:
        """The ranks' replies to BeginVAE. `bytes_needed`: for a rank's band. `weight_bytes`: for one copy of the weights."""
        ranks = map(self.pool.devices.count, self.pool.devices)
        messages = [m.BeginVAE(held_as, count * bytes_needed, count * weight_bytes) for count in ranks]
        return wait_for(self.pool.ask_each(messages, m.VAEBegun), poll)

    def _check_room(self, replies: Sequence[m.VAEBegun], bytes_needed: int) -> None:
        """Raise TooLittleMemory if a device lacks memory."""
        missing: dict[str, int] = {}
        for device, reply in zip(self.pool.devices, replies, strict=True):
            if reply.missing:
                missing[device] = max(missing.get(device, 0), reply.missing)  # each rank reports for its whole device
        if missing:
            raise TooLittleMemory(f"a device has less than the {bytes_needed / 1e9:.1f} GB that its part needs", missing)


def cut_along_columns(x: torch.Tensor) -> bool:
    """Whether to cut along columns. Bands along the longer side exchange less, and differ less in size."""
    return x.shape[-1] > x.shape[-2]


def bands(x: torch.Tensor, unit: int, ranks: int) -> tuple[Span, ...]:
    """Return each rank's rows (or columns) of x, counted in units of `unit` rows that must stay together."""
    return split(Span(0, max(x.shape[-2:]) // unit), ranks)
