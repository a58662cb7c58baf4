"""The part of a VAE on one rank: ComfyUI's own module, built from a message, runs on the rank's band of an image or
video."""

import json
from dataclasses import replace

import torch

from parallel_backend.core.spans import in_proportion
from parallel_backend.own_class.built.module_tree import Importing, built, set_constants
from parallel_backend.rank.comm.collectives import start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.free_memory import read_memory
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.messages import BeginVAE, PutVAE, RunVAE, VAEBegun, VAEOutput

from .banded_layers import COLUMNS, ROWS, Bands, OwnNeighbour

TRIAL_LIMIT = 1e-4
"""Largest allowed difference in float32 between bands and the whole image, relative to the largest value."""


class VAEPart:
    """A decoder or encoder on rank `rank` of the pool. `begin` and `run` are collective over the VAE's `ranks`."""

    def __init__(
        self, put: PutVAE, rank: int, ranks: tuple[int, ...], device: torch.device, heartbeat: Heartbeat | None = None
    ):
        self.name, self.rank, self.device = put.name, rank, device
        self.traffic = Traffic(device, heartbeat)
        self.bands = Bands(Axis("rows", len(ranks), ranks.index(rank), ranks, None), self.traffic)
        weights = {name: tensor.to(device) for name, tensor in put.tensors.items()}
        self.dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
        self.nbytes = sum(weight.nbytes for weight in weights.values())
        recipe = json.loads(put.recipe)
        importing = Importing(recipe["folder"], tuple(map(tuple, recipe["settings"])))
        self.model = built(recipe["tree"], importing, weights, self.bands.attention)
        self.call = recipe["call"]
        set_constants(recipe["constants"])
        self._trial = put.trial
        self.wrong = ""
        """Why bands give a different result than the whole image. Empty: no difference is known."""

    def begin(self, message: BeginVAE) -> VAEBegun:
        """Check that all ranks have enough memory. Before the first image, also try bands."""
        missing = max(0, message.bytes_needed - free_bytes(self.device))
        fits = self._all(missing == 0)
        if fits and self._trial is not None:
            self.wrong, self._trial = self._tried(self._trial), None
        return VAEBegun(self.rank, True, missing, self.wrong)

    @torch.inference_mode()
    def run(self, message: RunVAE) -> VAEOutput:
        """Run the VAE on the rank's band, or on its tiles."""
        # One band, or tiles, which run one by one to save memory.
        entries = (message.band,) if message.sizes else message.band.split(1) if len(message.band) else ()
        inputs = (entry.to(self.device, self.dtype, non_blocking=True) for entry in entries)
        outputs = [self._computed(each, message).cpu() for each in inputs]
        output = torch.cat(outputs) if outputs else torch.empty(0, dtype=self.dtype)
        return VAEOutput(self.rank, output)

    def end(self) -> None:
        """Free cached memory, which other programs may need until the next image."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _computed(self, x: torch.Tensor, message: RunVAE) -> torch.Tensor:
        """Output of the VAE's own code for a band of `message.sizes`. If there are no sizes, x is a whole image."""
        bands, call = self.bands, getattr(self.model, self.call)
        bands.sizes, bands.dim = message.sizes, COLUMNS if message.columns else ROWS
        if not message.sizes:
            return call(x)
        with bands:
            return call(x)

    @torch.inference_mode()
    def _tried(self, trial: RunVAE) -> str:
        """Return why the rank's band of a small image differs from the whole result. Empty: it does not. In float32, to
        exclude rounding."""
        self.model.float()
        x, index = trial.band.to(self.device, torch.float32), self.bands.axis.index
        dim = COLUMNS if trial.columns else ROWS
        part = x.split(trial.sizes, dim)[index]
        try:
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                whole, why = self._alone(x, part, trial)
                # A rank that fails among exchanges would leave the others waiting for it: all begin, or none does.
                if not self._all(not why):
                    return why
                band = self._computed(part, trial)
            rows = in_proportion(trial.sizes, whole.shape[dim])[index]
            own = whole.narrow(dim, rows.start, len(rows))
            if band.shape != own.shape:
                return f"a band is {list(band.shape)} of {list(own.shape)}"
            difference = float((band - own).abs().max() / whole.abs().max())
            return "" if difference <= TRIAL_LIMIT else f"its bands differ from the whole by {difference:.0e}"
        finally:
            self.model.to(self.dtype)

    def _alone(self, x: torch.Tensor, part: torch.Tensor, trial: RunVAE) -> tuple[torch.Tensor, str]:
        """Return (the whole output for x, the reason if the rank's part of x cannot be computed as a band). It is tried
        without other ranks: this rank is its own neighbour."""
        bands = OwnNeighbour(Axis("rows", 1, 0, (self.rank,), None), self.traffic)
        try:
            whole = self._computed(x, replace(trial, sizes=()))
            bands.sizes, bands.dim = (part.shape[self.bands.dim],), self.bands.dim
            with bands:
                getattr(self.model, self.call)(part)
        except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError) as error:
            return x, f"{type(error).__name__}: {error}"
        return whole, ""

    def _all(self, fits: bool) -> bool:
        """Whether `fits` is true on all ranks. If a rank ran out of memory half-way, the pool would end."""
        vote = torch.tensor([fits], dtype=torch.float32, device=self.device)
        votes = start_gather(vote, [1] * self.bands.axis.size, 0, self.bands.axis, self.traffic).wait()
        return bool(torch.cat(votes).all())


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate: free, or cached by torch's allocator."""
    report = read_memory(0, device, 0)
    return report.free_bytes + (report.cached_bytes or 0)
