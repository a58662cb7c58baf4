"""Transfers on the pipe axis: hidden states come from the previous stage and go to the next one, in micro-step order."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .mesh import LinkEnd
from .staging import from_staging, receivable, sendable
from .transfers import Traffic, Transfer

PIPE = "pipe"
"""The mesh axis under which the bytes are counted."""


class StageLink:
    """A stage's links to its neighbours. Receives can be posted ahead. Sent tensors are kept until their transfer has ended.
    `before`, `after`: the links to the previous and next stage, None at the pipeline's ends."""

    def __init__(self, before: LinkEnd | None, after: LinkEnd | None, device: torch.device, traffic: Traffic):
        self.before, self.after, self.device, self.traffic = before, after, device, traffic
        self._posted: list[tuple[torch.Tensor, Transfer]] = []
        self._sent: list[tuple[torch.Tensor, Transfer]] = []

    def post_receive(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start receiving the next tensor. There is no handshake, because both ends know the shape from the micro-step."""
        link = self.before
        assert link is not None
        buffer = receivable(shape, torch.empty(0, dtype=dtype, device=self.device), link.group)
        transfer = self.traffic.start(lambda: dist.irecv(buffer, link.peer, group=link.group))
        self._posted.append((buffer, transfer))

    def receive(self) -> torch.Tensor:
        """Wait for the oldest posted receive, and return its tensor."""
        # Oldest first: both ends issue transfers in micro-step order, and the n-th receive gets the n-th send.
        buffer, transfer = self._posted.pop(0)
        transfer.wait()
        return from_staging(buffer, self.device)

    def send(self, tensor: torch.Tensor, overlap: bool) -> None:
        """Start sending to the next stage. At most two sends are in progress, which bounds the memory of their tensors."""
        self.await_sends(keep=1)
        link = self.after
        assert link is not None
        tensor = sendable(tensor.contiguous(), link.group)
        self._sent.append((tensor, self.traffic.start(lambda: dist.isend(tensor, link.peer, group=link.group))))
        self.traffic.bytes_sent[PIPE] += tensor.nbytes
        if not overlap:
            self.await_sends()

    def await_sends(self, keep: int = 0) -> None:
        while len(self._sent) > keep:
            _, transfer = self._sent.pop(0)
            transfer.wait()
