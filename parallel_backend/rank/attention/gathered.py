"""Forms of attention in which a rank gets all keys and values before the kernel runs."""

import functools

import torch

from parallel_backend.rank.comm.collectives import start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic

from .context import Form, LayerCall


class Gathered:
    """Gathers the keys and values of all ranks of an axis. `inner`: attends to them. `ranks`: sequence ranks by index on the
    axis."""

    def __init__(self, inner: Form, axis: Axis, ranks: tuple[range, ...], traffic: Traffic):
        self._inner, self._axis, self._ranks, self._traffic = inner, axis, ranks, traffic

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BshD: torch.Tensor, v_BshD: torch.Tensor) -> torch.Tensor:
        lengths = of_axis(at.keys, self._ranks)
        parts = start_gather(torch.stack((k_BshD, v_BshD)), lengths, 2, self._axis, self._traffic).wait()
        return self._inner.attend(at, q_BQhD, *torch.cat(parts, dim=2))


class SharedKeys:
    """Removes repeated key heads if several query heads share one, so that less is sent and stored. `inner`: attends to the
    rest."""

    def __init__(self, inner: Form):
        self._inner = inner

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        times = at.spec.sharing
        if times > 1 and not (at.heads.start % times or at.heads.stop % times):
            k_BKhD, v_BKhD = k_BKhD[:, :, ::times], v_BKhD[:, :, ::times]
        return self._inner.attend(at, q_BQhD, k_BKhD, v_BKhD)


class Together:
    """The last form that knows about other ranks: repeats shared key heads, and calls the call's kernel."""

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        if not q_BQhD.shape[1] or not q_BQhD.shape[2]:
            return torch.empty_like(q_BQhD)
        if (times := q_BQhD.shape[2] // k_BKhD.shape[2]) > 1:
            k_BKhD, v_BKhD = (x.repeat_interleave(times, dim=2) for x in (k_BKhD, v_BKhD))
        return at.kernel.attend(at, q_BQhD, k_BKhD, v_BKhD)


@functools.lru_cache
def of_axis(lengths: tuple[int, ...], ranks: tuple[range, ...]) -> tuple[int, ...]:
    """Number of tokens for each index on an axis. `lengths`: by sequence rank. `ranks`: sequence ranks by index."""
    return tuple(sum(lengths[some.start : some.stop]) for some in ranks)
