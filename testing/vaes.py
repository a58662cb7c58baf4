"""VAEs of diffusers' on ranks, for tests and benchmarks."""

from collections.abc import Callable

import torch

from parallel_backend.client.shared_tensors import shared_output
from parallel_backend.client.vae import RemoteVAE
from parallel_backend.processes.pool import Poll, Pool
from parallel_backend.vaes.base import Part, Weights


def decoder_of(vae) -> Weights:
    """What ranks hold of a diffusers.AutoencoderKL to decode."""
    names = ("decoder.", "post_quant_conv.")
    tensors = {name: tensor for name, tensor in vae.state_dict().items() if name.startswith(names)}
    quant = tensors.get("post_quant_conv.weight")
    config = {
        "in_channels": vae.config.latent_channels,
        "out_channels": vae.config.out_channels,
        "block_out_channels": list(vae.config.block_out_channels),
        "layers_per_block": vae.config.layers_per_block,
        "post_quant": None if quant is None else list(quant.shape[:2]),
    }
    return Weights(config, tensors, 2 ** (len(config["block_out_channels"]) - 1), vae.config.out_channels)


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
        """What becomes of x, in memory that the ranks share where they can."""
        sizes, remote = self._sizes, self.remote
        shape, dtype = remote.shape(x, sizes.scale, sizes.channels), next(iter(sizes.tensors.values())).dtype
        with shared_output(remote.pool, shape, dtype) as (output, shared):
            remote.run(x, sizes.scale, output, poll, shared=shared, bytes_needed=bytes_needed)
        return output

    def tiles(self, x: torch.Tensor) -> torch.Tensor:
        """What becomes of the tiles [tiles, C, frames, rows, columns]."""
        (output,) = self.remote.run_tiles([x], lambda: None)
        return output
