"""Layers of a VAE that run on a band of the picture's rows or columns, and exchange rows or statistics with other ranks.

The VAE's modules become these by a change of class. The VAE's forward runs unchanged.
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
from parallel_backend.vaes.base import Edges, set_edges

from .halo import Halo, start_halo

STATISTICS_PIECES = 8
"""Pieces in which GroupNorm's statistics are computed. The float32 deviations of a whole activation would be the decoder's
largest tensor."""
ROWS, COLUMNS = -2, -1


@dataclass
class Bands:
    """State that the banded layers of one part of a VAE share."""

    axis: Axis
    traffic: Traffic
    sizes: tuple[int, ...] = ()
    """Number of rows, or columns, of each rank's band of the part's input. Set for every picture."""
    dim: int = ROWS
    """ROWS or COLUMNS: the dimension along which the picture is cut."""

    def adopt(self, model: nn.Module, gathered: Collection[str] = ()) -> None:
        """Make the layers of `model` that read other rows work on bands. `gathered`: see VAEClass."""
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                adopt_convolution(module, self)
            elif isinstance(module, nn.GroupNorm):
                _become_banded(module, BandedGroupNorm, self)
            if name.rpartition(".")[2] in gathered:
                module.register_forward_hook(lambda _module, _input, out: self.gather(out))
            if hasattr(module, "everywhere"):
                module.everywhere = self.gather

    def gather(self, band: torch.Tensor) -> torch.Tensor:
        """The bands of all ranks, in rank order: [B, local tokens, C] -> [B, all tokens, C];
        [..., local rows, columns] -> [..., all rows, columns] (if columns are cut: all columns)."""
        dim = 1 if band.ndim == 3 else self.dim % band.ndim
        # A layer's bands are in proportion to the part's input: all layers before shrink or enlarge by whole factors.
        lengths = [size * band.shape[dim] // self.sizes[self.axis.index] for size in self.sizes]
        return torch.cat(start_gather(band, lengths, dim, self.axis, self.traffic).wait(), dim=dim)


def _become_banded(module: nn.Module, layer: type[nn.Module], bands: Bands) -> None:
    """Change a module's class so that `layer` takes the place of the torch class that it derives from."""
    module.__class__ = _banded(type(module), layer)
    vars(module)["bands"] = bands


@functools.cache
def _banded(kind: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    """`kind` with `layer` between it and its torch class, so that what `kind` adds to the torch class stays."""
    return layer if kind in layer.__mro__ else type(f"Banded{kind.__name__}", (kind, layer), {})


def adopt_convolution(conv: nn.Conv2d | nn.Conv3d, bands: Bands) -> None:
    """Have a convolution with a kernel or padding in space pad its input by the neighbours' rows."""
    edges, kernel, stride = getattr(conv, "edges", None), conv.kernel_size[-2:], conv.stride[-2:]
    assert not isinstance(conv.padding, str)
    if edges is None:
        (top, left), mode = conv.padding[-2:], conv.padding_mode
        edges = Edges(left, left, top, top, "constant" if mode == "zeros" else mode)
    if kernel == stride == (1, 1) and edges == Edges(0, 0, 0, 0, edges.mode):
        return
    # Windows begin every `stride` rows from `top` rows before the band on, so the last one reads this many rows behind it.
    bottom, right = kernel[0] - stride[0] - edges.top, kernel[1] - stride[1] - edges.left
    # With a stride the last rows of the padding may be in no window: they are dropped.
    fits = edges.bottom == bottom if stride[0] == 1 else edges.bottom >= bottom >= 0
    fits = fits and (edges.right == right if stride[1] == 1 else edges.right >= right >= 0)
    plain = conv.dilation[-2:] == (1, 1) and edges.mode in ("constant", "reflect", "replicate")
    in_time = conv.padding_mode == "zeros" or not any(conv.padding[:-2])
    assert fits and plain and in_time, f"a band cannot be convolved by {conv}"
    layer = BandedConv2d if isinstance(conv, nn.Conv2d) else BandedConv3d
    _become_banded(conv, layer, bands)
    set_edges(conv, Edges(edges.left, right, edges.top, bottom, edges.mode))


class _BandedConvolution:
    """A convolution of a band [B, C, (frames,) local rows, columns]. The torch class pads in time."""

    bands: Bands
    edges: Edges
    stride: tuple[int, ...]

    def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Called last by the forward of torch's classes, and of classes derived from them that pad their input in time."""
        bands, edges, rows = self.bands, self.edges, self.bands.dim == ROWS
        before, behind = (edges.top, edges.bottom) if rows else (edges.left, edges.right)
        halo = start_halo(x, bands.dim, before, behind, bands.axis, bands.traffic)
        zeros = edges.mode == "constant" and edges.left == edges.right and edges.top == edges.bottom
        if zeros and before == behind <= 1 and self.stride[bands.dim] == 1:
            return self._seamless(x, weight, bias, halo)
        parts = halo.wait()
        x = torch.cat([part for part in (parts[0], x, parts[1]) if part is not None], dim=bands.dim)
        # Padding beyond the picture, on the sides where no neighbour is.
        outer = [before if parts[0] is None else 0, behind if parts[1] is None else 0]
        across = [edges.left, edges.right] if rows else [edges.top, edges.bottom]
        around = [*across, *outer] if rows else [*outer, *across]
        if any(around):
            # Other modes than "constant" need the padding of all dimensions of a video.
            x = F.pad(x, (*around, 0, 0) if x.ndim == 5 and edges.mode != "constant" else around, edges.mode)
        return self._convolved(x, weight, bias, (0, 0))

    def _seamless(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, halo: Halo) -> torch.Tensor:
        """Convolve with zeros beyond the band while the neighbours' rows arrive, then the first and last row anew with them.

        This hides the transfer, and saves the copy of x into a larger tensor.
        """
        dim = self.bands.dim
        out = self._convolved(x, weight, bias, (self.edges.top, self.edges.left))
        across = (0, self.edges.left) if dim == ROWS else (self.edges.top, 0)
        halves = halo.wait()
        zeros = torch.zeros_like(x.narrow(dim, 0, 1))
        before, behind = (zeros if rows is None else rows for rows in halves)
        # An outermost row's window is the halo and two rows of the band, or one row between two halos.
        length, inner = x.shape[dim], min(2, x.shape[dim])
        if halves[0] is not None:
            first = torch.cat((before, x.narrow(dim, 0, inner), behind), dim).narrow(dim, 0, 3)
            out.narrow(dim, 0, 1).copy_(self._convolved(first, weight, bias, across))
        if halves[1] is not None:
            last = torch.cat((before, x.narrow(dim, length - inner, inner), behind), dim).narrow(dim, inner - 1, 3)
            out.narrow(dim, length - 1, 1).copy_(self._convolved(last, weight, bias, across))
        return out

    def _convolved(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
    ) -> torch.Tensor:
        """The convolution of x with `padding` rows and columns of zeros on either side."""
        raise NotImplementedError


class BandedConv2d(_BandedConvolution, nn.Conv2d):
    def _convolved(self, x, weight, bias, padding):
        return F.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)


class BandedConv3d(_BandedConvolution, nn.Conv3d):
    def _convolved(self, x, weight, bias, padding):
        return F.conv3d(x, weight, bias, self.stride, (self.padding[0], *padding), self.dilation, self.groups)


class BandedGroupNorm(nn.GroupNorm):
    """A GroupNorm whose statistics are over all ranks' bands."""

    bands: Bands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, ...] of the rank's band -> the same shape and dtype. Computed in float32."""
        bands, batch = self.bands, x.shape[0]
        if bands.axis.size == 1:
            return super().forward(x)
        local = torch.stack(statistics(x, self.num_groups))[None]  # [1, 2, B x groups]
        parts = start_gather(local, [1] * bands.axis.size, 0, bands.axis, bands.traffic).wait()
        means, variances = torch.cat(parts).double().unbind(1)
        # Merged as in Chan, Golub and LeVeque (1979), since sums of squares would lose digits where the mean is large. A
        # band's share is by its rows, which need not be equal on all ranks. Each is filled in on the device: a tensor made
        # from a list would be copied there from pageable memory, which makes the host wait in every layer.
        share = torch.cat([means.new_full((1, 1), size / sum(bands.sizes)) for size in bands.sizes])
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        # torch's GroupNorm takes no statistics, but BatchNorm in inference does: each channel gets those of its group.
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
        variances.append((piece - mean).square_().mean(dim=1))  # torch.var_mean takes ten times as long on a CPU
    return torch.cat(means), torch.cat(variances)
