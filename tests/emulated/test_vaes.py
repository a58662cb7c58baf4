"""Each class of VAE in bands, or in tiles, on emulated devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.vaes import VAES
from parallel_backend.vaes.base import Part, Weights
from testing import tiny
from testing.vaes import OnRanks
from tests.campaigns.transport.cases import nothing
from tests.support.cpu_and_gpu import Both
from tests.vaes.test_vae_pieces import HUNYUAN, LTX

pytestmark = pytest.mark.threads

LEVELS = {"channels": 3, "widths": [32, 32, 64], "layers": 1, "z": 4, "quant": True}
WAN = {"dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "in_time": [True, True]}
WAN |= {"is_residual": False, "channels": 3, "patch": 1}
HUNYUAN_VIDEO_15 = HUNYUAN | {"factors": [[2, 2, 2], [2, 2, 2]]}
HUNYUAN_IMAGE = HUNYUAN | {"kind": "image", "chunked": False, "factors": [[2, 2], [2, 2]], "widths": [64, 64, 32]}
REFINER = HUNYUAN | {"kind": "refiner", "chunked": False, "factors": [[2, 2, 2], [2, 2, 2]], "widths": [64, 64, 32]}
H3 = {
    "quant": [4, 4],
    "in_channels": 4,
    "out_channels": 3,
    "num_layers": 1,
    "num_attention_heads": 1,
    "num_register_tokens": 4,
}

H3_ENCODER = {"quant": [8, 8], "in_channels": 3, "out_channels": 8, "block_out_channels": [32] * 6, "layers_per_block": 1}


@dataclass(frozen=True)
class VAE:
    """`shape`: of the input. `scale`, `channels`: see Weights."""

    kind: str
    part: Part
    config: dict[str, Any]
    shape: tuple[int, ...]
    scale: int
    channels: int

    def weights(self) -> Weights:
        module = tiny.randomise(VAES[self.kind].build(self.part, self.config), seed=0)
        return Weights(self.config, dict(module.state_dict()), self.scale, self.channels)

    def run(self, _load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
        weights, x = self.weights(), torch.randn(self.shape, generator=torch.Generator().manual_seed(1))
        ranks = OnRanks(pool(2), f"{self.kind} {self.part}", lambda: weights, weights, self.kind, self.part)
        if VAES[self.kind].independent:
            return [ranks.tiles(x), ranks.tiles(x * 2)]
        return [ranks.decode(x, nothing), ranks.decode(x * 2, nothing)]


CASES = (
    VAE("AutoencoderKL", "decoder", LEVELS | {"times": [0, 0], "chunked": False}, (2, 4, 7, 3), 4, 3),
    VAE("AutoencoderKL", "encoder", LEVELS | {"times": [0, 0], "chunked": False}, (1, 3, 24, 12), 4, 4),
    VAE("HunyuanVideo", "decoder", LEVELS | {"times": [2, 2], "chunked": True}, (1, 4, 3, 4, 3), 4, 3),
    VAE("HunyuanVideo", "encoder", LEVELS | {"times": [2, 2], "chunked": True}, (1, 3, 9, 16, 12), 4, 4),
    VAE("HunyuanVideo 1.5", "decoder", HUNYUAN_VIDEO_15, (1, 4, 3, 4, 3), 4, 3),
    VAE("HunyuanVideo 1.5", "encoder", HUNYUAN_VIDEO_15, (1, 3, 9, 16, 8), 4, 4),
    VAE("HunyuanImage 2.1", "decoder", HUNYUAN_IMAGE, (1, 4, 4, 3), 4, 3),
    VAE("HunyuanImage 2.1", "encoder", HUNYUAN_IMAGE, (1, 3, 16, 12), 4, 4),
    VAE("HunyuanImage 2.1 refiner", "decoder", REFINER, (1, 4, 2, 4, 3), 4, 3),
    VAE("HunyuanImage 2.1 refiner", "encoder", REFINER, (1, 3, 8, 16, 12), 4, 4),
    VAE("LTX-Video", "decoder", LTX, (1, 8, 3, 4, 3), 16, 3),
    VAE("LTX-Video", "encoder", LTX, (1, 3, 17, 64, 32), 16, 8),
    VAE("Cosmos", "decoder", {"latent_channels": 4, "widths": [32, 32, 16, 16], "layers": 1}, (1, 4, 2, 4, 3), 8, 3),
    VAE("Cosmos", "encoder", {"latent_channels": 4, "widths": [16, 16, 32, 32], "layers": 1}, (1, 3, 9, 32, 24), 8, 4),
    VAE("AutoencoderKLWan", "decoder", WAN, (1, 4, 3, 4, 6), 4, 3),
    VAE("AutoencoderKLWan", "encoder", WAN, (1, 3, 9, 16, 24), 4, 4),
    VAE("AutoencoderKLMiniMaxH3", "decoder", H3, (3, 4, 2, 4, 4), 16, 3),
    VAE("AutoencoderKLMiniMaxH3", "encoder", H3_ENCODER, (3, 3, 17, 32, 32), 16, 8),
)
QUICK = ("AutoencoderKL decoder",)
DEFAULT = (
    *("HunyuanVideo encoder", "HunyuanVideo 1.5 decoder", "LTX-Video decoder", "Cosmos encoder"),
    *("AutoencoderKLWan decoder", "AutoencoderKLMiniMaxH3 decoder"),
)


def of_vaes() -> list[pytest.param]:
    named = {f"{case.kind} {case.part}": case for case in CASES}
    assert {case.kind for case in CASES} == VAES.keys() and {*QUICK, *DEFAULT} <= named.keys()
    return [
        pytest.param(
            case,
            id=name,
            marks=[pytest.mark.slow] * (name not in QUICK) + [pytest.mark.full] * (name not in QUICK + DEFAULT),
        )
        for name, case in named.items()
    ]


@pytest.mark.parametrize("case", of_vaes())
def test_every_class(both: Both, case: VAE):
    found = both.check(case.run)
    assert all(each.std() > 1e-3 for each in found)
