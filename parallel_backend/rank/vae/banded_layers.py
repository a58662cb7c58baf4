"""Runs a VAE's own code on a band of the image's rows or columns. Operations that read other rows get them from other ranks.

When the code pads, a band gets its neighbours' rows, and padding only at the image's edge. GroupNorms have one mean and
variance over all ranks, and attention has all ranks' keys and values. All other operations must be local: upsampling,
pooling by whole factors, norms over channels. A trial checks that (part.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from parallel_backend.rank.comm.collectives import start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic

from .halo import Halo, start_halo

STATISTICS_PIECES = 8
"""Number of pieces in which GroupNorm's statistics are computed. The float32 deviations of a whole activation would be the
decoder's largest tensor."""
ROWS, COLUMNS = -2, -1
Convolution = Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]
"""(x, padding of rows and columns) -> the convolution of x, which itself pads frames."""


class Bands(TorchFunctionMode):
    """Context in which torch functions on this thread treat tensors [B, C, (frames,) rows, columns] as a rank's bands."""

    def __init__(self, axis: Axis, traffic: Traffic):
        super().__init__()
        self.axis, self.traffic = axis, traffic
        self.sizes: tuple[int, ...] = ()
        """Rows (or columns) of each rank's band of the input, set for every image. Empty: the input is a whole image."""
        self.dim = ROWS
        """The dimension along which the image is cut: ROWS or COLUMNS."""
        self._banded = {
            F.conv2d: self._convolution,
            F.conv3d: self._convolution,
            torch.cudnn_convolution: self._cudnn_convolution,
            F.pad: self._pad,
            F.group_norm: self._group_norm,
            torch.Tensor.numel: self._numel,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        banded = self._banded.get(func)
        return func(*args, **(kwargs or {})) if banded is None else banded(func, *args, **(kwargs or {}))

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Replaces the VAE's attention: one head over all pixels of each batch entry. All tensors are [B, C, ...]."""
        if self.sizes:
            k, v = self.gather(torch.cat((k, v), dim=1)).chunk(2, dim=1)
        shape = q.shape
        q, k, v = (x.flatten(2).transpose(1, 2)[:, None].contiguous() for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(shape)

    def gather(self, band: torch.Tensor) -> torch.Tensor:
        """Return the bands of all ranks in rank order: [..., local rows, columns] -> [..., all rows, columns]."""
        dim = self.dim % band.ndim
        # A layer's bands are in proportion to the input: all layers before shrink or enlarge by whole factors.
        lengths = [size * band.shape[dim] // self.sizes[self.axis.index] for size in self.sizes]
        return torch.cat(start_gather(band, lengths, dim, self.axis, self.traffic).wait(), dim=dim)

    def _numel(self, numel: Any, x: torch.Tensor) -> int:
        """Number of elements of the largest band, so that code that depends on memory does the same on all ranks."""
        own = self.sizes[self.axis.index]
        return numel(x) * max(self.sizes) // own if x.ndim in (4, 5) else numel(x)

    def _convolution(self, function: Any, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> torch.Tensor:
        def convolved(x: torch.Tensor, around: tuple[int, int]) -> torch.Tensor:
            return function(x, weight, bias, stride, (*_each(padding, weight)[:-2], *around), dilation, groups)

        return self._convolved(convolved, x, _each(padding, weight)[-2:], _each(stride, weight)[-2:])

    def _cudnn_convolution(
        self, function: Any, x, weight, padding, stride, dilation, groups, **options: Any
    ) -> torch.Tensor:
        def convolved(x: torch.Tensor, around: tuple[int, int]) -> torch.Tensor:
            return function(x, weight, (*padding[:-2], *around), stride, dilation, groups, **options)

        return self._convolved(convolved, x, padding[-2:], stride[-2:])

    def _convolved(
        self, convolved: Convolution, x: torch.Tensor, padding: tuple[int, int], stride: tuple[int, int]
    ) -> torch.Tensor:
        """Return a convolution with `padding` zeros around the image. Without padding it needs no other rows, because x is
        padded already."""
        rows = padding[self.dim]
        if not rows:
            return convolved(x, padding)
        halo, step, length = self._halo(x, rows, rows), stride[self.dim], x.shape[self.dim]
        if rows == step == 1:
            return self._seamless(convolved, x, padding, halo)
        x = self._surrounded(x, halo, rows, rows, lambda x, around: F.pad(x, around))
        out = convolved(x, self._across(padding))
        assert out.shape[self.dim] * step == length, "a band is not convolved to as many rows as it has in the whole"
        return out

    def _seamless(self, convolved: Convolution, x: torch.Tensor, padding: tuple[int, int], halo: Halo) -> torch.Tensor:
        """Convolve with zeros around the band while the neighbours' rows arrive, then recompute the first and last row with
        them. This hides the transfer, and avoids copying x into a larger tensor."""
        dim = self.dim
        out, across = convolved(x, padding), self._across(padding)
        assert out.shape[dim] == x.shape[dim], "a band is not convolved to as many rows as it has in the whole"
        halves = halo.wait()
        zeros = torch.zeros_like(x.narrow(dim, 0, 1))
        before, behind = (zeros if rows is None else rows for rows in halves)
        # An outermost row's window is the halo and two rows of the band, or one row between two halos.
        length, inner = x.shape[dim], min(2, x.shape[dim])
        if halves[0] is not None:
            first = torch.cat((before, x.narrow(dim, 0, inner), behind), dim).narrow(dim, 0, 3)
            out.narrow(dim, 0, 1).copy_(convolved(first, across))
        if halves[1] is not None:
            last = torch.cat((before, x.narrow(dim, length - inner, inner), behind), dim).narrow(dim, inner - 1, 3)
            out.narrow(dim, length - 1, 1).copy_(convolved(last, across))
        return out

    def _pad(
        self, pad: Any, x: torch.Tensor, pads: Sequence[int], mode: str = "constant", value: Any = None
    ) -> torch.Tensor:
        place = 2 * (-1 - self.dim)  # `pads` begins with the last dimension's
        before, behind = pads[place : place + 2] or (0, 0)
        if not (before or behind):
            return pad(x, pads, mode, value)
        assert mode != "circular" and min(before, behind) >= 0, "a band has no neighbour on the image's other side"
        halo = self._halo(x, before, behind)

        def padded(x: torch.Tensor, around: list[int]) -> torch.Tensor:
            return pad(x, [*pads[:place], *around[place : place + 2], *pads[place + 2 :]], mode, value)

        return self._surrounded(x, halo, before, behind, padded)

    def _halo(self, x: torch.Tensor, before: int, behind: int) -> Halo:
        return start_halo(x, self.dim, before, behind, self.axis, self.traffic)

    def _surrounded(
        self,
        x: torch.Tensor,
        halo: Halo,
        before: int,
        behind: int,
        padded: Callable[[torch.Tensor, list[int]], torch.Tensor],
    ) -> torch.Tensor:
        """x with its neighbours' rows, or with `padded` at the image's edges."""
        parts = halo.wait()
        x = torch.cat([part for part in (parts[0], x, parts[1]) if part is not None], dim=self.dim)
        around = [before if parts[0] is None else 0, behind if parts[1] is None else 0]
        return padded(x, around if self.dim == COLUMNS else [0, 0, *around])

    def _across(self, padding: tuple[int, int]) -> tuple[int, int]:
        """Return the padding without that of the dimension that is cut."""
        return (0, padding[1]) if self.dim == ROWS else (padding[0], 0)

    def _group_norm(self, norm: Any, x, groups, weight=None, bias=None, eps=1e-5) -> torch.Tensor:
        """GroupNorm of the rank's band [B, C, ...]. Statistics are over all bands, in float32."""
        axis, (batch, channels) = self.axis, x.shape[:2]
        if axis.size == 1:
            return norm(x, groups, weight, bias, eps)
        local = torch.stack(statistics(x, groups))[None]  # [1, 2, B x groups]
        parts = start_gather(local, [1] * axis.size, 0, axis, self.traffic).wait()
        means, variances = torch.cat(parts).double().unbind(1)
        # Merged as in Chan, Golub and LeVeque (1979), since sums of squares would lose digits where the mean is large. A
        # band's share is by its rows, which need not be equal on all ranks. Each is filled in on the device: a tensor made
        # from a list would be copied there from pageable memory, which makes the host wait in every layer.
        share = torch.cat([means.new_full((1, 1), size / sum(self.sizes)) for size in self.sizes])
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        # torch's GroupNorm takes no statistics, but BatchNorm in inference does: each channel gets those of its group.
        mean, variance = (value.float().repeat_interleave(channels // groups) for value in (mean, variance))
        weight, bias = (None if value is None else value.float().repeat(batch) for value in (weight, bias))
        flat = x.reshape(1, batch * channels, *x.shape[2:])
        return F.batch_norm(flat, mean, variance, weight, bias, False, 0.0, eps).reshape(x.shape)


class OwnNeighbour(Bands):
    """Bands of a single rank that is its own neighbour, to try the code without another rank."""

    def _halo(self, x: torch.Tensor, before: int, behind: int) -> Halo:
        halo = super()._halo(x, before, behind)
        last, first = x.narrow(self.dim, x.shape[self.dim] - before, before), x.narrow(self.dim, 0, behind)
        halo.received = [last if before else None, first if behind else None]
        return halo


def _each(value: Any, weight: torch.Tensor) -> tuple[int, ...]:
    """Return a convolution's argument as a number for each dimension."""
    assert not isinstance(value, str), "the padding of a band is given as numbers"
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * (weight.ndim - 2) if len(values) == 1 else values


def statistics(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and variance of each group of channels of [B, C, ...], each [B x groups] float32."""
    flat, means, variances = x.reshape(len(x) * groups, -1), [], []
    for piece in flat.split(-(-len(flat) // STATISTICS_PIECES)):
        mean = piece.mean(dim=1, keepdim=True, dtype=torch.float32)
        means.append(mean[:, 0])
        variances.append((piece - mean).square_().mean(dim=1))  # torch.var_mean takes ten times as long on a CPU
    return torch.cat(means), torch.cat(variances)
