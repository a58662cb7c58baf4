"""Layers of a decoder that run on a band of the picture's rows, with what they need of the other ranks' bands.

diffusers' modules become these by a change of class. Its decoder runs unchanged.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.rank.comm.collectives import start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic

from .halo import start_halo

STATISTICS_PIECES = 8
"""Pieces in which GroupNorm's statistics are computed. An activation's float32 deviations, whole, would be the decoder's
largest tensor."""


@dataclass
class Bands:
    """State that the banded layers of one decoder share."""

    axis: Axis
    traffic: Traffic
    rows: tuple[int, ...] = ()
    """Each rank's rows of the latent, set for every picture."""

    def adopt(self, decoder: nn.Module) -> None:
        """Make the layers of `decoder` that read other rows work on bands. Does nothing for one rank."""
        if self.axis.size == 1:
            return
        for name, module in decoder.named_modules():
            if type(module) is nn.Conv2d and module.kernel_size != (1, 1):
                BandedConv2d.adopt(module, self)
            elif type(module) is nn.GroupNorm:
                BandedGroupNorm.adopt(module, self)
            elif name.rpartition(".")[2] in ("to_k", "to_v"):
                module.register_forward_hook(self._gather_tokens)

    def _gather_tokens(self, _module: nn.Module, _input: tuple, own: torch.Tensor) -> torch.Tensor:
        """Forward hook: [B, own rows x W, C] -> [B, all rows x W, C], in the picture's order."""
        width = own.shape[1] // self.rows[self.axis.index]
        lengths = [rows * width for rows in self.rows]
        return torch.cat(start_gather(own, lengths, 1, self.axis, self.traffic).wait(), dim=1)


class BandedConv2d(nn.Conv2d):
    """A 3x3 convolution with zero padding, stride 1, on a band of rows."""

    bands: Bands

    @staticmethod
    def adopt(conv: nn.Conv2d, bands: Bands) -> None:
        kind = conv.kernel_size, conv.padding, conv.stride, conv.dilation, conv.groups, conv.padding_mode
        assert kind == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros"), f"a band cannot be convolved by {conv}"
        conv.__class__, conv.bands = BandedConv2d, bands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, own rows, W] -> [B, D, own rows, W].

        The band is convolved with zeros beyond it while the neighbours' rows arrive. Then its first and last row are
        convolved again, with those rows. So transfers are hidden, and x is not copied into a larger tensor.
        """
        halo = start_halo(x, self.bands.axis, self.bands.traffic)
        out = super().forward(x)
        above, below = halo.wait()
        # In a band of one row both are that row.
        first = torch.cat((above, x[:, :, :2], below), dim=2)[:, :, :3]
        last = torch.cat((above, x[:, :, -2:], below), dim=2)[:, :, -3:]
        out[:, :, :1] = F.conv2d(first, self.weight, self.bias, padding=(0, 1))
        out[:, :, -1:] = F.conv2d(last, self.weight, self.bias, padding=(0, 1))
        return out


class BandedGroupNorm(nn.GroupNorm):
    """A GroupNorm over all ranks' bands."""

    bands: Bands

    @staticmethod
    def adopt(norm: nn.GroupNorm, bands: Bands) -> None:
        norm.__class__, norm.bands = BandedGroupNorm, bands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, ...] of the rank's rows -> the same shape and dtype. Computed in float32.

        Ranks exchange mean and variance of their bands, which are merged as in Chan, Golub and LeVeque (1979). Sums of
        squares would lose digits where the mean is large.
        """
        bands, batch = self.bands, x.shape[0]
        own = torch.stack(statistics(x, self.num_groups))[None]  # [1, 2, B x groups]
        parts = start_gather(own, [1] * bands.axis.size, 0, bands.axis, bands.traffic).wait()
        means, variances = torch.cat(parts).double().unbind(1)
        share = means.new_tensor(bands.rows)[:, None] / sum(bands.rows)
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
