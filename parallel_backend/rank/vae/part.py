"""A part of a VAE on one rank: the module of its class with weights from a message, run on the rank's band of each piece."""

import json

import torch

from parallel_backend.core.device_copies import to_host
from parallel_backend.core.spans import in_proportion
from parallel_backend.rank.comm.collectives import start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.free_memory import read_memory
from parallel_backend.vaes import VAES
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.messages import BeginVAE, PutVAE, RunVAE, VAEBegun, VAEOutput

from .banded_layers import COLUMNS, ROWS, Bands

PART_BYTES = 1 << 26
"""Bytes of a band that come to the host at a time."""


class VAEPart:
    """A decoder or encoder on rank `rank` of the pool. `begin` and `run` are collective over `ranks`, which have it."""

    def __init__(
        self, put: PutVAE, rank: int, ranks: tuple[int, ...], device: torch.device, heartbeat: Heartbeat | None = None
    ):
        self.name, self.rank, self.device = put.name, rank, device
        kind = VAES[put.kind]
        self.traffic = Traffic(device, heartbeat)
        self.bands = Bands(Axis("rows", len(ranks), ranks.index(rank), ranks, None), self.traffic)
        with torch.device("meta"):
            self.model = kind.build(put.part, json.loads(put.config))
        # Shared memory, which is page-locked, stays as it is until the rank handles DropSegment; other memory has been read.
        weights = {name: tensor.to(device, non_blocking=True) for name, tensor in put.tensors.items()}
        self.dtype = next(iter(weights.values())).dtype
        self.nbytes = sum(weight.nbytes for weight in weights.values())
        self.model.load_state_dict(weights, assign=True)
        self.model.to(device).eval().requires_grad_(False)
        if not kind.independent:
            self.bands.adopt(self.model, kind.gathered)

    def begin(self, message: BeginVAE) -> VAEBegun:
        """Drop the state of an earlier picture, and find out whether all ranks have the memory."""
        self.end()
        missing = max(0, message.bytes_needed - free_bytes(self.device))
        return VAEBegun(self.rank, True, not self._all(missing == 0), missing)

    @torch.inference_mode()
    def run(self, message: RunVAE) -> VAEOutput:
        """Run the rank's band of a piece, or its tiles. The output is written to shared memory or sent."""
        bands = self.bands
        bands.sizes, bands.dim = message.sizes, COLUMNS if message.columns else ROWS
        if message.first:
            self.model.reset()
        # One band, or tiles, which run one by one to save memory.
        entries = (message.band,) if message.sizes else message.band.split(1) if len(message.band) else ()
        outputs = []
        for entry in entries:
            band = self.model(entry.to(self.device, self.dtype, non_blocking=True), message.first)
            if message.output is None:
                outputs.append(band.cpu())
            else:
                self._place(band, message.output, message)
        output = None if message.output is not None else torch.cat(outputs) if outputs else torch.empty(0, dtype=self.dtype)
        return VAEOutput(self.rank, output, self.traffic.report()[0])

    def end(self) -> None:
        """Drop the module's state between pieces."""
        self.model.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # a picture takes much memory, which other programs may need until the next one

    def _place(self, band: torch.Tensor, target: torch.Tensor, message: RunVAE) -> None:
        """Write the band to its rows and frames of `target`, the output of all ranks."""
        if band.ndim == 5:
            target = target.narrow(2, message.frame, band.shape[2])
        rows = in_proportion(message.sizes, target.shape[self.bands.dim])[self.bands.axis.index]
        target = target.narrow(self.bands.dim, rows.start, len(rows))
        if not band.numel():  # such as an encoder's for a piece of few frames
            return
        # A copy from a GPU into rows of a larger tensor would go through pageable memory. Parts of it come through
        # page-locked memory, which torch keeps: so much of it as one part takes.
        length = max(1, PART_BYTES * band.shape[2] // band.nbytes)
        for place, part in zip(target.split(length, 2), band.split(length, 2), strict=True):
            place.copy_(to_host([part])[0])

    def _all(self, fits: bool) -> bool:
        """Whether the picture fits on all ranks. A rank that ran out of memory half-way would end the pool."""
        vote = torch.tensor([fits], dtype=torch.float32, device=self.device)
        votes = start_gather(vote, [1] * self.bands.axis.size, 0, self.bands.axis, self.traffic).wait()
        return bool(torch.cat(votes).all())


def free_bytes(device: torch.device) -> int:
    """Memory that this process can still allocate: free, or cached by torch's allocator."""
    report = read_memory(0, device, 0)
    return report.free_bytes + (report.cached_bytes or 0)
