"""Parallel VAE Encode, and Parallel VAE Decode of video VAEs, against the VAEs' own encode and decode. Run by serve.py.

VAEs have ComfyUI's classes, made as Load VAE makes them, with fewer channels and random weights.
"""

import contextlib
import importlib
import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest.mock import patch

from boot import Results, comfy, difference, node, nodes, torch
from comfy_execution.utils import CurrentNodeContext
from vae import (
    DDCONFIG,
    Recorder,
    a_huge_estimate,
    h3_vae,
    image_vae,
    randomised,
    room_is_made,
    wan22_vae,
    wan_vae,
    with_a_huge_estimate,
)

RANKS = "cpu,cpu"


def with_less(kind: Callable[..., Any], **less: Any) -> Callable[..., Any]:
    """A class of ComfyUI's whose settings are replaced by smaller ones."""
    return lambda **config: kind(**config | less)


def hunyuan_video_vae() -> comfy.sd.VAE:
    config = DDCONFIG | {"ch": 32, "z_channels": 16, "conv3d": True, "time_compress": 4, "num_res_blocks": 1}
    made = with_less(comfy.sd.AutoencoderKL, ddconfig=config)
    with patch.object(comfy.sd, "AutoencoderKL", made):
        vae = comfy.sd.VAE(sd=randomised(made(embed_dim=16)))
    assert vae.latent_dim == 3
    return vae


def hunyuan_vae(layers: str, channels: int, factor: int, **more: Any) -> comfy.sd.VAE:
    """HunyuanImage 2.1, its refiner, and HunyuanVideo 1.5. `layers`: their module in comfy.ldm.hunyuan_video."""
    module = importlib.import_module(f"comfy.ldm.hunyuan_video.{layers}")
    levels = factor.bit_length()
    less = {"block_out_channels": [32] * (levels - 1) + [2 * channels], "num_res_blocks": 1}
    sizes = less | {"in_channels": 3, "z_channels": channels, "ffactor_spatial": factor, "ffactor_temporal": 4, **more}
    parts = {"encoder": module.Encoder(**sizes), "decoder": module.Decoder(**sizes | {"out_channels": 3})}
    state = {f"{part}.{name}": value for part, made in parts.items() for name, value in randomised(made).items()}
    made = {"Encoder": with_less(module.Encoder, **less), "Decoder": with_less(module.Decoder, **less)}
    with patch.multiple(module, **made):
        return comfy.sd.VAE(sd=state)


LTX_SMALL = {
    "dims": 3,
    "latent_channels": 128,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "encoder_base_channels": 8,
}
LTX_09 = LTX_SMALL | {
    "blocks": [
        ["res_x", 1],
        ["compress_all", 1],
        ["res_x_y", 1],
        ["res_x", 1],
        ["compress_all", 1],
        ["compress_all", 1],
        ["res_x", 1],
    ],
    "decoder_base_channels": 16,
}
"""LTX-Video 0.9: strided convolutions, a decoder that looks ahead, reflection at the edges."""
LTX_095 = LTX_SMALL | {
    "encoder_blocks": [
        ["res_x", {"num_layers": 1}],
        ["compress_space_res", {"multiplier": 2}],
        ["compress_time_res", {"multiplier": 2}],
        ["compress_all_res", {"multiplier": 2}],
        ["compress_all_res", {"multiplier": 1}],
        ["res_x", {"num_layers": 1}],
    ],
    "decoder_blocks": [
        ["res_x", {"num_layers": 1}],
        ["compress_all", {"residual": True, "multiplier": 2}],
        ["compress_all", {"residual": True, "multiplier": 2}],
        ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 1}],
    ],
    "decoder_base_channels": 4,
    "timestep_conditioning": True,
}
"""LTX-Video 0.9.5 and later: a little noise before decoding."""
LTX_091 = LTX_095 | {
    "decoder_blocks": [[name, {**given, "inject_noise": name == "res_x"}] for name, given in LTX_095["decoder_blocks"]],
}
"""LTX-Video 0.9.1: noise inside the decoder's layers."""
LTX_2 = LTX_095 | {"timestep_conditioning": False, "causal_decoder": True, "spatial_padding_mode": "zeros"}


def ltx_vae(config: dict[str, Any]) -> comfy.sd.VAE:
    made = comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE(config=config)
    state = randomised(made) | {"per_channel_statistics.std-of-means": 0.5 + torch.rand(128)}
    if "decoder.timestep_scale_multiplier" in state:
        state["decoder.timestep_scale_multiplier"] = torch.tensor(1000.0)
    # What tells ComfyUI the class.
    state.setdefault("decoder.up_blocks.0.res_blocks.0.conv1.conv.weight", torch.empty(0))
    return comfy.sd.VAE(sd=state, metadata={"config": json.dumps({"vae": config})})


def cosmos_vae() -> comfy.sd.VAE:
    module = comfy.ldm.cosmos.vae
    made = with_less(module.CausalContinuousVideoTokenizer, channels=16, num_res_blocks=1)
    config = {
        "z_channels": 16,
        "latent_channels": 16,
        "z_factor": 1,
        "resolution": 1024,
        "in_channels": 3,
        "out_channels": 3,
    }
    config |= {"channels_mult": [2, 4, 4], "attn_resolutions": [32], "dropout": 0.0, "patch_size": 4, "num_groups": 1}
    state = randomised(made(**config, temporal_compression=8, spacial_compression=8))
    state["latent_std"] = 0.5 + torch.rand(state["latent_std"].shape)
    with patch.object(module, "CausalContinuousVideoTokenizer", made):
        return comfy.sd.VAE(sd=state | {"decoder.unpatcher3d.wavelets": torch.ones(2)})


class Compares:
    """Runs ComfyUI's node and ours, and compares."""

    def __init__(self):
        import server  # ComfyUI's; it is found once boot.py is imported

        server.PromptServer.instance = self.recorder = Recorder()

    def encode(self, vae: comfy.sd.VAE, frames: int, rows: int, columns: int, devices: str = RANKS) -> dict[str, Any]:
        pixels = torch.rand(frames, rows, columns, 3, generator=torch.Generator().manual_seed(2))
        ours = self._said("ParallelVAEEncode", pixels, vae, devices)
        return self._compared(ours["samples"], nodes.VAEEncode().encode(vae, pixels)[0]["samples"])

    def decode(self, vae: comfy.sd.VAE, *shape: int, devices: str = RANKS) -> dict[str, Any]:
        latent = {"samples": torch.randn(shape, generator=torch.Generator().manual_seed(1))}
        torch.manual_seed(3)  # some draw a little noise
        ours = self._said("ParallelVAEDecode", latent, vae, devices)
        torch.manual_seed(3)
        return self._compared(ours, nodes.VAEDecode().decode(vae, latent)[0])

    def _said(self, name: str, given: Any, vae: comfy.sd.VAE, devices: str) -> Any:
        """The node's output. ComfyUI's estimates of memory are for the real widths, some gigabytes which may not be free."""
        self.recorder.said.clear()
        little = lambda shape, dtype: 1  # noqa: E731
        if vae.memory_used_decode is a_huge_estimate:  # by which the case goes
            known = contextlib.nullcontext()
        else:
            known = patch.multiple(vae, memory_used_encode=little, memory_used_decode=little)
        with CurrentNodeContext("prompt", "7"), known:
            return node(name, given, vae, devices)

    def _compared(self, ours: torch.Tensor, whole: torch.Tensor) -> dict[str, Any]:
        return {
            "difference": difference(ours, whole) / float(whole.abs().max()),
            "spread": float(whole.std() / whole.abs().max()),
            "alike": (ours.shape, ours.dtype, ours.device) == (whole.shape, whole.dtype, whole.device),
            "said": self.recorder.said[-1][1],
        }


def main(results: Results) -> None:
    compares = Compares()
    encode, decode = compares.encode, compares.decode

    images = {"SD": image_vae(4), "Flux": image_vae(16, post_quant=False), "Flux.2": image_vae(32, packed=True)}
    results.case("encode SD, batch 2, odd size", lambda: encode(images["SD"], 2, 45, 37))
    results.case("encode Flux, columns", lambda: encode(images["Flux"], 1, 24, 40, "cpu,cpu,cpu"))
    results.case("encode Flux.2", lambda: encode(images["Flux.2"], 1, 48, 32))
    results.case("encode too small", lambda: encode(images["SD"], 1, 8, 8))
    results.case("encode Wan 2.1", lambda: encode(wan_vae(), 9, 40, 24))
    results.case("encode Wan 2.2", lambda: encode(wan22_vae(), 5, 48, 32))
    results.case("encode MiniMax H3", lambda: encode(h3_vae(), 22, 96, 80))

    hunyuan = cache(hunyuan_video_vae)
    results.case("encode HunyuanVideo", lambda: encode(hunyuan(), 14, 40, 24))
    results.case("decode HunyuanVideo", lambda: decode(hunyuan(), 1, 16, 4, 5, 3))
    results.case("decode HunyuanVideo, one frame, batch 2", lambda: decode(hunyuan(), 2, 16, 1, 3, 4))
    picture = cache(partial(hunyuan_vae, "vae", 64, 32))
    results.case("encode HunyuanImage 2.1", lambda: encode(picture(), 1, 96, 64))
    results.case("decode HunyuanImage 2.1, batch 2", lambda: decode(picture(), 2, 64, 2, 3))
    refiner = cache(partial(hunyuan_vae, "vae_refiner", 32, 16, refiner_vae=False))
    results.case("encode refiner", lambda: encode(refiner(), 1, 48, 32))
    results.case("decode refiner", lambda: decode(refiner(), 1, 32, 1, 3, 2))
    video = cache(partial(hunyuan_vae, "vae_refiner", 32, 16))
    results.case("encode HunyuanVideo 1.5", lambda: encode(video(), 9, 48, 32))
    results.case("decode HunyuanVideo 1.5", lambda: decode(video(), 1, 32, 3, 3, 2))

    for name, config in {"LTX-Video 0.9": LTX_09, "LTX-Video 0.9.5": LTX_095, "LTX-2": LTX_2}.items():
        vae = ltx_vae(config)
        results.case(f"encode {name}", lambda vae=vae: encode(vae, 17, 96, 64))
        results.case(f"decode {name}", lambda vae=vae: decode(vae, 1, 128, 3, 3, 2))
    timed, drawing = ltx_vae(LTX_095), lambda vae: decode(vae, 1, 128, 2, 3, 2)
    results.case("decode with noise, once room is made", lambda: room_is_made(timed, drawing))
    results.case("decode with noise, too little memory", lambda: drawing(with_a_huge_estimate(timed)))
    results.case("decode noisy", lambda: decode(ltx_vae(LTX_091), 1, 128, 2, 3, 2))
    cosmos = cosmos_vae()
    results.case("encode Cosmos", lambda: encode(cosmos, 9, 40, 24))
    results.case("decode Cosmos", lambda: decode(cosmos, 1, 16, 3, 5, 3))
    results.case("encode Cosmos, uneven", lambda: encode(cosmos, 12, 40, 24))
