"""Which of some tokens of a video are of which frame."""

from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span


@dataclass
class FrameRows:
    """Of the videos of one size."""

    frame: torch.Tensor
    """[N] on the host: frame of each place of the token order."""
    device: torch.device
    """Where indices go."""
    known: dict[Any, Any]
    """Where indices are kept, by places."""

    def of(self, places: tuple[Span, ...]) -> list[torch.Tensor]:
        """By frame: indices, on the device, among the tokens of `places` one behind the other. Frames may have none."""
        if (key := ("frame rows", places)) not in self.known:
            frame = torch.cat([self.frame[span.slice] for span in places])
            numbers = range(int(self.frame.max()) + 1)
            self.known[key] = [to_device((frame == number).nonzero()[:, 0], self.device) for number in numbers]
        return self.known[key]
