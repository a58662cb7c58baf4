"""diffusers' VAEs on ranks, for tests and benchmarks."""

import re
from collections.abc import Callable

import torch

from parallel_backend.client.shared_tensors import shared_output
from parallel_backend.client.vae import RemoteVAE
from parallel_backend.processes.pool import Poll, Pool
from parallel_backend.vaes import VAES
from parallel_backend.vaes.base import Part, Weights

LAYERS = (
    (r"mid_block\.resnets\.0\.", "mid.block_1."),
    (r"mid_block\.resnets\.1\.", "mid.block_2."),
    (r"mid_block\.attentions\.0\.", "mid.attn_1."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"\.resnets\.", ".block."),
    ("conv_shortcut", "nin_shortcut"),
    ("conv_norm_out|group_norm", "norm"),
    (r"to_([qkv])\.", r"\1."),
    (r"to_out\.0", "proj_out"),
    (r"decoder\.norm\.", "decoder.norm_out."),
)
"""diffusers' names -> those of files."""


def original_decoder(vae) -> dict[str, torch.Tensor]:
    """A diffusers.AutoencoderKL's decoder as files have it, and its 1x1 convolution."""
    state, last = {}, len(vae.config.block_out_channels) - 1
    for name, tensor in vae.state_dict().items():
        if not name.startswith(("decoder.", "post_quant_conv.")):
            continue
        name = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{last - int(match[1])}", name)
        for theirs, original in LAYERS:
            name = re.sub(theirs, original, name)
        state[name] = tensor[..., None, None] if tensor.ndim == 2 else tensor
    return state


def decoder_of(vae) -> Weights:
    """The weights of a diffusers.AutoencoderKL's decoder as ranks need them."""
    return VAES["AutoencoderKL"].weights(original_decoder(vae), "decoder", {})


class OnRanks:
    """A decoder, or an encoder, on the ranks of a pool. `weights` is asked when they lack them, `sizes` for sizes."""

    def __init__(
        self,
        pool: Pool,
        name: str,
        weights: Callable[[], Weights],
        sizes: Weights | None = None,
        kind: str = "AutoencoderKL",
        part: Part = "decoder",
    ):
        self.remote, self._sizes = RemoteVAE(pool, name, kind, part, weights), sizes or weights()

    @property
    def bytes_sent(self) -> list[dict[str, int]]:
        return self.remote.bytes_sent

    def decode(self, x: torch.Tensor, poll: Poll, bytes_needed: int = 0) -> torch.Tensor:
        """The output for x, in memory that the ranks share if possible."""
        sizes, remote = self._sizes, self.remote
        shape, dtype = remote.shape(x, sizes.scale, sizes.channels), next(iter(sizes.tensors.values())).dtype
        with shared_output(remote.pool, shape, dtype) as (output, shared):
            remote.run(x, sizes.scale, output, poll, shared=shared, bytes_needed=bytes_needed)
        return output

    def tiles(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of the tiles [tiles, C, frames, rows, columns]."""
        (output,) = self.remote.run_tiles([x], lambda: None)
        return output
