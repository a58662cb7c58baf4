"""Which of some tokens of a video are of which frame."""

from dataclasses import dataclass, field

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
    _known: dict[tuple[Span, ...], list[torch.Tensor]] = field(default_factory=dict, init=False)

    def of(self, places: tuple[Span, ...]) -> list[torch.Tensor]:
        """By frame: indices, on the device, among the tokens of `places` one behind the other. Frames may have none."""
        if places not in self._known:
            frame = torch.cat([self.frame[span.slice] for span in places])
            numbers = range(int(self.frame.max()) + 1)
            self._known[places] = [to_device((frame == number).nonzero()[:, 0], self.device) for number in numbers]
        return self._known[places]
