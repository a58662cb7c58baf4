"""What the node calls: a latent goes to all ranks, their bands of pixels come back as one picture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from parallel_backend.core.spans import Span, split
from parallel_backend.processes.pool import Poll, Pool, wait_for
from parallel_backend.wire import messages as m


class TooLittleMemory(RuntimeError):
    """A rank's device has too little memory for its rows. Nothing was computed, and the ranks go on."""


@dataclass
class RemoteDecoder:
    """A decoder on the ranks of `pool`. `name` stands for its weights: ranks that hold it are not sent it again.

    `weights` gives its tensors (see keys.to_diffusers) in the dtype to compute in; asked only when the ranks lack them, at
    first and after another model was loaded. `bytes_sent`: what each rank sent to others for the last picture.
    """

    pool: Pool
    name: str
    weights: Callable[[], Mapping[str, torch.Tensor]]
    bytes_sent: list[dict[str, int]] = field(default_factory=list)

    def decode(self, latent: torch.Tensor, poll: Poll, bytes_needed: int = 0) -> torch.Tensor:
        """[B, C, H, W], with a row for each rank at least -> [B, 3, 8 H, 8 W] on the CPU. Exact, up to rounding.

        `bytes_needed`: for the rows of one rank; TooLittleMemory where a device has less. What `poll` raises ends the
        waiting, and the ranks finish the picture unheard. RankError when a rank fails.
        """
        assert latent.shape[2] >= len(self.pool.devices), "a rank would have no rows"
        wait_for(self.pool.ready, poll)
        parts = self._ask(latent, bytes_needed, poll)
        if any(part.pixels is None and not part.short_of_memory for part in parts):
            # No look at Cancel between ranks: if only some of them held it, the others would wait for those in vain.
            self.pool.tell(m.PutDecoder(self.name, dict(self.weights())))
            parts = self._ask(latent, bytes_needed, poll)
        if any(part.short_of_memory for part in parts):
            raise TooLittleMemory(f"a device has less than the {bytes_needed / 1e9:.1f} GB that its rows need")
        self._check(parts, latent)
        self.bytes_sent = [part.bytes_sent for part in parts]
        return torch.cat([part.pixels for part in parts], dim=2)

    def _check(self, parts: list[m.Decoded], latent: torch.Tensor) -> None:
        """RankError for a part that is not the rank's rows of the picture."""
        rows = split(Span(0, latent.shape[2]), len(parts))
        side = parts[0].pixels.shape[-1] // latent.shape[3] if parts[0].pixels is not None else 0
        for part, own in zip(parts, rows, strict=True):
            expected = (latent.shape[0], 3, side * len(own), side * latent.shape[3])
            if part.pixels is None or side == 0 or part.pixels.shape != expected:
                found = None if part.pixels is None else list(part.pixels.shape)
                raise self.pool.refuse(part.rank, f"rows of a picture of the shape {found} for {len(own)} rows of latent")

    def _ask(self, latent: torch.Tensor, bytes_needed: int, poll: Poll) -> list[m.Decoded]:
        return wait_for(self.pool.ask(m.Decode(self.name, latent, bytes_needed), m.Decoded), poll)
