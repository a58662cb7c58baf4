"""A tensor of a card of fake_cuda.py that can be cut and copied to the host, and nothing else."""

from typing import NamedTuple

import torch

from .fake_cuda import FakeCuda


class CopyToHost(NamedTuple):
    """How a tensor left the card."""

    asynchronous: bool
    page_locked: bool
    contiguous: bool


class OnCard(torch.Tensor):
    """A copy of it is a second of the card's work, and is noted in `copies`."""

    @staticmethod
    def of(values: torch.Tensor, cuda: FakeCuda, copies: list[CopyToHost], device: int = 1) -> "OnCard":
        place = torch.device("cuda", device)
        made = torch.Tensor._make_wrapper_subclass(OnCard, values.shape, dtype=values.dtype, device=place)
        made.values, made.cuda, made.copies = values, cuda, copies
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.split.Tensor:
            tensor, *cut = args
            return [OnCard.of(part, tensor.cuda, tensor.copies, tensor.device.index) for part in tensor.values.split(*cut)]
        assert func is torch.ops.aten.copy_.default, func
        into, tensor, non_blocking = (*args, False)[:3]
        tensor.cuda.issue(1.0, tensor.device.index)
        tensor.copies.append(CopyToHost(non_blocking, tensor.cuda.runtime.holds(into), into.is_contiguous()))
        return into.copy_(tensor.values)
