"""A rank's VAE decoder: diffusers' Decoder with weights from a message, run on this rank's rows of each latent."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from parallel_backend.checkpoints.vae_keys import DECODER, POST_QUANT
from parallel_backend.core.spans import Span, split
from parallel_backend.rank.comm.collectives import start_gather
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.free_memory import read_memory
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.messages import Decode, Decoded, PutDecoder

from .banded_layers import Bands

GROUPS = 32
"""Groups of every GroupNorm in these decoders. The weights do not tell."""


class BandedDecoder:
    """Rank `rank`'s part of a decoder over all ranks of the pool. `decode` is collective over them."""

    def __init__(self, put: PutDecoder, rank: int, world: int, device: torch.device, heartbeat: Heartbeat | None = None):
        self.name, self.rank, self.device = put.name, rank, device
        self.dtype = put.tensors[f"{DECODER}conv_in.weight"].dtype
        self.traffic = Traffic(device, heartbeat)
        self.bands = Bands(Axis("rows", world, rank, tuple(range(world)), None), self.traffic)
        self.model = build_decoder({name: tensor.to(device) for name, tensor in put.tensors.items()})
        self.bands.adopt(self.model)

    @torch.inference_mode()
    def decode(self, message: Decode) -> Decoded:
        """Decode the rank's rows of the latent."""
        spans = split(Span(0, message.latent.shape[2]), self.bands.axis.size)
        self.bands.rows = tuple(len(span) for span in spans)
        pixels = None
        if enough := self._all_have(message.bytes_needed):
            pixels = self.model(message.latent[:, :, spans[self.rank].slice].to(self.device, self.dtype)).cpu()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what a picture takes is much, and not needed again before the next one
        return Decoded(self.rank, pixels, not enough, self.traffic.report()[0])

    def _all_have(self, needed: int) -> bool:
        """Whether all ranks have `needed` bytes. A rank that ran out of memory half-way would end the pool."""
        own = torch.tensor([needed <= free_bytes(self.device)], dtype=torch.float32, device=self.device)
        votes = start_gather(own, [1] * self.bands.axis.size, 0, self.bands.axis, self.traffic).wait()
        return all(bool(vote) for vote in votes)


def free_bytes(device: torch.device) -> float:
    """Memory that this process can still get. Infinite if that is not known."""
    found = read_memory(0, device, 0)
    return math.inf if found.free_bytes is None else found.free_bytes + found.cached_bytes


def build_decoder(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """diffusers' Decoder, with the 1x1 convolution before it that some VAEs have. Latents [B, C, H, W] -> [B, 3, 8 H, 8 W].

    `tensors`: see vae_keys.to_diffusers. They give the sizes and become the parameters.
    """
    from diffusers.models.autoencoders.vae import Decoder  # imports every autoencoder there is

    def first(name: str) -> torch.Tensor:
        return tensors[f"{DECODER}{name}.weight"]

    def count(pattern: str) -> int:
        index = 0
        while f"{DECODER}{pattern.format(index)}.conv1.weight" in tensors:
            index += 1
        return index

    levels = count("up_blocks.{}.resnets.0")
    widths = [first(f"up_blocks.{level}.resnets.0.conv1").shape[0] for level in range(levels)]
    with torch.device("meta"):
        decoder = Decoder(
            in_channels=first("conv_in").shape[1],
            out_channels=first("conv_out").shape[0],
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(reversed(widths)),
            layers_per_block=count("up_blocks.0.resnets.{}") - 1,
            norm_num_groups=GROUPS,
        )
        quant = tensors.get(f"{POST_QUANT}.weight")
        before = nn.Identity() if quant is None else nn.Conv2d(quant.shape[1], quant.shape[0], 1)
    model = nn.Sequential()
    model.add_module(POST_QUANT, before)
    model.add_module(DECODER.rstrip("."), decoder)
    model.load_state_dict(dict(tensors), assign=True)
    return model.eval().requires_grad_(False)
