"""Tokens of a video by frame."""

from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span


@dataclass
class FrameRows:
    """The frames of the tokens of videos of one size."""

    frame_S: torch.Tensor
    """Frame of each token, in token order. On the host."""
    device: torch.device
    """Target of index tensors."""
    known: dict[Any, Any]
    """Cache of index tensors, keyed by spans."""

    def of(self, spans: tuple[Span, ...]) -> list[torch.Tensor]:
        """By frame: indices, on the device, among the concatenated tokens of `spans`. Frames may have none."""
        if (key := ("frame rows", spans)) not in self.known:
            frame_s = torch.cat([self.frame_S[span.slice] for span in spans])
            numbers = range(int(self.frame_S.max()) + 1)
            self.known[key] = [to_device((frame_s == number).nonzero()[:, 0], self.device) for number in numbers]
        return self.known[key]
