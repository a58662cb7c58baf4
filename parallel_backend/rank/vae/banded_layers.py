"""Layers of a VAE that run on a band of the picture's rows or columns, with what they need of the other ranks' bands.

The class's own modules become these by a change of class. Its forward runs unchanged.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.rank.comm.collectives import start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.vaes.base import Edges

from .halo import Halo, start_halo

STATISTICS_PIECES = 8
"""Pieces in which GroupNorm's statistics are computed. An activation's float32 deviations, whole, would be the decoder's
largest tensor."""
ROWS, COLUMNS = -2, -1


@dataclass
class Bands:
    """State that the banded layers of one part of a VAE share."""

    axis: Axis
    traffic: Traffic
    sizes: tuple[int, ...] = ()
    """Each rank's rows, or columns, of the part's input, set for every picture."""
    dim: int = ROWS
    """What the picture is cut along."""

    def adopt(self, model: nn.Module, gathered: Collection[str] = ()) -> None:
        """Make the layers of `model` that read other rows work on bands. `gathered`: see VAEClass."""
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                adopt_convolution(module, self)
            elif isinstance(module, nn.GroupNorm):
                module.__class__, module.bands = _banded(type(module), BandedGroupNorm), self
            if name.rpartition(".")[2] in gathered:
                module.register_forward_hook(lambda _module, _input, own: self.gather(own))
            if hasattr(module, "everywhere"):
                module.everywhere = self.gather

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The bands of all ranks: [B, own tokens, C] -> [B, all tokens, C], band after band, and
        [..., own rows, columns] -> [..., all rows, columns] of the picture (or its columns, where those are cut)."""
        dim = 1 if own.ndim == 3 else self.dim % own.ndim
        lengths = [size * own.shape[dim] // self.sizes[self.axis.index] for size in self.sizes]
        return torch.cat(start_gather(own, lengths, dim, self.axis, self.traffic).wait(), dim=dim)


@functools.cache
def _banded(kind: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    """`layer` in the place of the torch class that `kind` derives from: what `kind` does beside it stays."""
    return layer if kind in layer.__mro__ else type(f"Banded{kind.__name__}", (kind, layer), {})


def adopt_convolution(conv: nn.Conv2d | nn.Conv3d, bands: Bands) -> None:
    """Have a convolution with a kernel or padding in space pad its input by what the neighbours have."""
    edges, kernel, stride = getattr(conv, "edges", None), conv.kernel_size[-2:], conv.stride[-2:]
    if edges is None:
        (top, left), mode = conv.padding[-2:], conv.padding_mode
        edges = Edges(left, left, top, top, "constant" if mode == "zeros" else mode)
    if kernel == stride == (1, 1) and edges == Edges(0, 0, 0, 0, edges.mode):
        return
    # The window of a band's last row reads as many rows behind the band.
    bottom, right = kernel[0] - stride[0] - edges.top, kernel[1] - stride[1] - edges.left
    # With strides the last rows of the padding may be in no window.
    fits = edges.bottom == bottom if stride[0] == 1 else edges.bottom >= bottom >= 0
    fits = fits and (edges.right == right if stride[1] == 1 else edges.right >= right >= 0)
    plain = conv.dilation[-2:] == (1, 1) and edges.mode in ("constant", "reflect", "replicate")
    in_time = conv.padding_mode == "zeros" or not any(conv.padding[:-2])
    assert fits and plain and in_time, f"a band cannot be convolved by {conv}"
    layer = BandedConv2d if isinstance(conv, nn.Conv2d) else BandedConv3d
    conv.__class__, conv.bands = _banded(type(conv), layer), bands
    conv.edges = Edges(edges.left, right, edges.top, bottom, edges.mode)


class _BandedConvolution:
    """A convolution of a band, [B, C, (frames,) own rows, columns]. Padding in time is the convolution's own."""

    bands: Bands
    edges: Edges

    def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What torch's forward ends in, and those of classes that pad their input in time before it."""
        bands, edges, rows = self.bands, self.edges, self.bands.dim == ROWS
        before, behind = (edges.top, edges.bottom) if rows else (edges.left, edges.right)
        halo = start_halo(x, bands.dim, before, behind, bands.axis, bands.traffic)
        zeros = edges.mode == "constant" and edges.left == edges.right and edges.top == edges.bottom
        if zeros and before == behind <= 1 and self.stride[bands.dim] == 1:
            return self._seamless(x, weight, bias, halo)
        parts = halo.wait()
        x = torch.cat([part for part in (parts[0], x, parts[1]) if part is not None], dim=bands.dim)
        # What lies beyond the picture's own edges.
        outer = [before if parts[0] is None else 0, behind if parts[1] is None else 0]
        across = [edges.left, edges.right] if rows else [edges.top, edges.bottom]
        around = [*across, *outer] if rows else [*outer, *across]
        if any(around):
            x = F.pad(x, (*around, 0, 0) if x.ndim == 5 and edges.mode != "constant" else around, edges.mode)
        return self._convolved(x, weight, bias, (0, 0))

    def _seamless(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, halo: Halo) -> torch.Tensor:
        """With zeros beyond the band while the neighbours' rows arrive; then its first and last row again, with those rows.

        So transfers are hidden, and x is not copied into a larger tensor.
        """
        dim = self.bands.dim
        out = self._convolved(x, weight, bias, (self.edges.top, self.edges.left))
        across = (0, self.edges.left) if dim == ROWS else (self.edges.top, 0)
        halves = halo.wait()
        nothing = torch.zeros_like(x.narrow(dim, 0, 1))
        before, behind = (nothing if half is None else half for half in halves)
        length, own = x.shape[dim], min(2, x.shape[dim])  # in a band of one row both are that row
        if halves[0] is not None:
            first = torch.cat((before, x.narrow(dim, 0, own), behind), dim).narrow(dim, 0, 3)
            out.narrow(dim, 0, 1).copy_(self._convolved(first, weight, bias, across))
        if halves[1] is not None:
            last = torch.cat((before, x.narrow(dim, length - own, own), behind), dim).narrow(dim, own - 1, 3)
            out.narrow(dim, length - 1, 1).copy_(self._convolved(last, weight, bias, across))
        return out

    def _convolved(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
    ) -> torch.Tensor:
        """With zeros around it, `padding` rows and columns on either side."""
        raise NotImplementedError


class BandedConv2d(_BandedConvolution, nn.Conv2d):
    def _convolved(self, x, weight, bias, padding):
        return F.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)


class BandedConv3d(_BandedConvolution, nn.Conv3d):
    def _convolved(self, x, weight, bias, padding):
        return F.conv3d(x, weight, bias, self.stride, (self.padding[0], *padding), self.dilation, self.groups)


class BandedGroupNorm(nn.GroupNorm):
    """A GroupNorm over all ranks' bands."""

    bands: Bands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, ...] of the rank's rows -> the same shape and dtype. Computed in float32.

        Ranks exchange mean and variance of their bands, which are merged as in Chan, Golub and LeVeque (1979). Sums of
        squares would lose digits where the mean is large.
        """
        bands, batch = self.bands, x.shape[0]
        if bands.axis.size == 1:
            return super().forward(x)
        own = torch.stack(statistics(x, self.num_groups))[None]  # [1, 2, B x groups]
        parts = start_gather(own, [1] * bands.axis.size, 0, bands.axis, bands.traffic).wait()
        means, variances = torch.cat(parts).double().unbind(1)
        share = means.new_tensor(bands.sizes)[:, None] / sum(bands.sizes)
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        # With the statistics given, a group's channels are normalised as a BatchNorm does in inference.
        channels = self.num_channels // self.num_groups
        mean, variance = (value.float().repeat_interleave(channels) for value in (mean, variance))
        weight, bias = (value.float().repeat(batch) for value in (self.weight, self.bias))
        flat = x.reshape(1, batch * self.num_channels, *x.shape[2:])
        return F.batch_norm(flat, mean, variance, weight, bias, False, 0.0, self.eps).reshape(x.shape)


def statistics(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, C, ...] -> mean and variance of each group of channels, [B x groups] float32 each."""
    flat, means, variances = x.reshape(len(x) * groups, -1), [], []
    for piece in flat.split(-(-len(flat) // STATISTICS_PIECES)):
        mean = piece.mean(dim=1, keepdim=True, dtype=torch.float32)
        means.append(mean[:, 0])
        variances.append((piece - mean).square_().mean(dim=1))  # torch.var_mean is ten times as slow on a CPU
    return torch.cat(means), torch.cat(variances)
