"""The transfers between ranks: short functions, shapes before and after in the docstring, every byte counted.

Shape letters: B batch entries, S tokens of all ranks of the axis, s tokens of this rank, H heads, h heads of this rank
(H = h * u), D head size, u ranks of the axis.
"""

import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .mesh import Axis


class PeerError(RuntimeError):
    """A transfer failed: the other rank, or the link to it, is gone."""


class Traffic:
    """What this rank sent, in bytes by mesh axis, and how long it was blocked in transfers."""

    def __init__(self):
        self.bytes_sent: Counter[str] = Counter()
        self.wait_seconds = 0.0

    def wait(self, work: dist.Work) -> None:
        start = time.perf_counter()
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        self.wait_seconds += time.perf_counter() - start


def _staged(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Gloo moves host memory only: CUDA tensors go through a copy."""
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


def all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis, traffic: Traffic) -> torch.Tensor:
    """[sum(send), ...] -> [sum(receive), ...]: rows send[i] go to rank i of the axis, receive[i] rows come from it."""
    out = x.new_empty(sum(receive), *x.shape[1:])
    row_bytes = x[0].numel() * x.element_size() if len(x) else 0
    traffic.bytes_sent[axis.name] += (sum(send) - send[axis.index]) * row_bytes
    source, target = (x.cpu(), out.cpu()) if _staged(x, axis.group) else (x, out)
    try:
        work = dist.all_to_all_single(target, source, list(receive), list(send), group=axis.group, async_op=True)
    except RuntimeError as error:
        raise PeerError(str(error)) from error
    traffic.wait(work)
    if target is not out:
        out.copy_(target)
    return out


def sequence_to_heads(
    q_BsHD: torch.Tensor,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    lengths: Sequence[int],
    axis: Axis,
    traffic: Traffic,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ulysses (arXiv 2309.14509), before attention: three [B, s, H, D] -> three [B, S, h, D].

    `lengths[j]`: tokens of rank j, which need not be equal. The tokens of the result stand rank after rank. One
    all-to-all carries q, k and v, since on slow links the number of messages counts.
    """
    batch, own, heads, size = q_BsHD.shape
    u = axis.size
    qkv = torch.stack((q_BsHD, k_BsHD, v_BsHD)).view(3, batch, own, u, heads // u, size)
    rows = qkv.permute(3, 2, 0, 1, 4, 5).reshape(u * own, 3, batch, heads // u, size)
    rows = all_to_all(rows.contiguous(), [own] * u, lengths, axis, traffic)  # with one token `reshape` is a view
    return tuple(rows[:, i].transpose(0, 1) for i in range(3))


def heads_to_sequence(out_BShD: torch.Tensor, lengths: Sequence[int], axis: Axis, traffic: Traffic) -> torch.Tensor:
    """Ulysses, after attention: [B, S, h, D] -> [B, s, H, D], the inverse of `sequence_to_heads`."""
    batch, _, heads, size = out_BShD.shape
    own = lengths[axis.index]
    rows = all_to_all(out_BShD.transpose(0, 1).contiguous(), lengths, [own] * axis.size, axis, traffic)
    return rows.view(axis.size, own, batch, heads, size).permute(2, 1, 0, 3, 4).reshape(batch, own, -1, size)


class StageLink:
    """The pipe axis: hidden states come from the stage before and go to the stage after, in micro-step order.

    Receives can be posted ahead of their use. Every send's handle is kept, with its tensor, until it has been awaited.
    """

    def __init__(self, axis: Axis, device: torch.device, traffic: Traffic):
        self.axis, self.device, self.traffic = axis, device, traffic
        self.overlap = True
        self._posted: list[tuple[torch.Tensor, dist.Work]] = []
        self._sent: list[tuple[torch.Tensor, dist.Work]] = []

    @property
    def posted(self) -> int:
        """Receives that were posted and not yet taken."""
        return len(self._posted)

    def post_receive(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start receiving the next tensor; its shape is known from the micro-step, no handshake."""
        on_host = self.device.type == "cuda" and dist.get_backend() == "gloo"
        buffer = torch.empty(*shape, dtype=dtype, device="cpu" if on_host else self.device)
        self._posted.append((buffer, self._start(dist.irecv, buffer, self.axis.index - 1)))

    def receive(self) -> torch.Tensor:
        """The oldest posted receive, complete."""
        buffer, work = self._posted.pop(0)
        self.traffic.wait(work)
        return buffer.to(self.device)

    def send(self, tensor: torch.Tensor) -> None:
        """Start sending to the next stage. Waits first for the send before the last, so at most two are under way."""
        self.await_sends(keep=1)
        tensor = tensor.contiguous()
        if _staged(tensor, None):
            tensor = tensor.cpu()
        self._sent.append((tensor, self._start(dist.isend, tensor, self.axis.index + 1)))
        self.traffic.bytes_sent[self.axis.name] += tensor.nbytes
        if not self.overlap:
            self.await_sends()

    def await_sends(self, keep: int = 0) -> None:
        while len(self._sent) > keep:
            _, work = self._sent.pop(0)
            self.traffic.wait(work)

    def _start(self, operation, tensor: torch.Tensor, index: int) -> dist.Work:
        try:
            return operation(tensor, self.axis.ranks[index])
        except RuntimeError as error:
            raise PeerError(str(error)) from error
