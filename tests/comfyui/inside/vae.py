"""Parallel VAE Encode and Decode against the VAEs' own encode and decode. Run by serve.py.

VAEs have ComfyUI's classes, made as Load VAE makes them, with fewer channels and random weights.
"""

import contextlib
import copy
import functools
import gc
import importlib
import json
import weakref
from typing import Any
from unittest.mock import patch

from boot import BUNDLED, Results, comfy, difference, ksampler, node, nodes, parallel, torch

from testing.quantised import stored

WIDE, NARROW = 128, 32
RANKS, THREE = "cpu,cpu", "cpu,cpu,cpu"
DDCONFIG = {
    "double_z": True,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}


class Recorder:
    """In the place of a running server: keeps what nodes say on themselves, to the page that has queued the prompt."""

    client_id = "page"

    def __init__(self):
        self.said: list[tuple[str, str]] = []

    def send_progress_text(self, text: str, node_id: str, client_id: str) -> None:
        assert client_id == self.client_id
        self.said.append((node_id, text))

    def send_sync(self, event: str, data: dict[str, str], client_id: str) -> None:
        assert client_id == self.client_id
        assert (event, (data["node"], data["text"])) == ("parallel_dit.said", self.said[-1])


def randomised(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights that keep the pixels within what process_output does not clamp, mostly; statistics are no round numbers."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, tensor in model.state_dict().items():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 16
        values = torch.randn(tensor.shape, generator=generator) * 0.7 / fan_in**0.5
        positive = "var" in name or "gamma" in name or ("norm" in name and name.endswith("weight"))
        state[name] = values.abs() + 0.5 if positive else values
    return state


def image_vae(channels: int, width: int = NARROW, post_quant: bool = True, packed: bool = False) -> comfy.sd.VAE:
    """As Load VAE makes it."""
    wide = DDCONFIG | {"ch": WIDE, "z_channels": channels, "batch_norm_latent": packed}
    kind = comfy.ldm.models.autoencoder.AutoencoderKL
    state = randomised(kind(ddconfig=wide, decoder_ddconfig=wide | {"ch": width}, embed_dim=channels))
    vae = comfy.sd.VAE(sd={key: value for key, value in state.items() if post_quant or "quant_conv" not in key})
    assert type(vae.first_stage_model).__name__ == ("AutoencoderKL" if post_quant else "AutoencodingEngine")
    return vae


def wan_vae(channels: int = 3) -> comfy.sd.VAE:
    """Wan 2.1's class, also Qwen-Image's; pictures of several layers have 4 channels."""
    sizes = {"dim": 16, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}
    more = {} if channels == 3 else {"image_channels": channels, "conv_out_channels": channels}  # new in 0.33
    return comfy.sd.VAE(sd=randomised(comfy.ldm.wan.vae.WanVAE(**sizes, **more)))


def h3_vae(quantised: bool = False) -> comfy.sd.VAE:
    """With tiles of 4 x 4 of its latent, and a decoder of one narrow layer, `quantised` as the templates' file."""
    from comfy.ldm.minimax import vae as module

    vit = functools.partial(module.ViT3DDecoder, num_layers=1, heads=2)
    small = functools.partial(module.MiniMaxH3VideoVAE, ch=32, num_res_blocks=1, tile_size=64, tile_overlap_min=16)
    with patch.object(module, "ViT3DDecoder", vit), patch.object(module, "MiniMaxH3VideoVAE", small):
        state = randomised(small())
        return comfy.sd.VAE(sd=int8_decoder(state) if quantised else state)


def int8_decoder(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The decoder's blocks in int8_tensorwise, rotated."""
    found = {}
    for key, value in state.items():
        blocks = key.startswith("decoder.transformer_blocks.") and value.ndim == 2
        found |= stored(key.removesuffix(".weight"), value, "int8, rotated") if blocks else {key: value}
    return found


def hunyuan_video_vae() -> comfy.sd.VAE:
    config = DDCONFIG | {"ch": 32, "z_channels": 16, "conv3d": True, "time_compress": 4, "num_res_blocks": 1}
    made = functools.partial(comfy.sd.AutoencoderKL, ddconfig=config)
    with patch.object(comfy.sd, "AutoencoderKL", lambda **given: made(**given | {"ddconfig": config})):
        vae = comfy.sd.VAE(sd=randomised(made(embed_dim=16)))
    assert vae.latent_dim == 3
    return vae


LTX_09 = {
    "dims": 3,
    "latent_channels": 128,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "encoder_base_channels": 8,
    "decoder_base_channels": 16,
}
"""LTX-Video 0.9: strided convolutions, a decoder that looks ahead, reflection at the edges."""


def ltx_vae(noisy: bool = False, timed: bool = False) -> comfy.sd.VAE:
    """`noisy`: with noise inside the decoder's layers, as 0.9.1 has it. `timed`: with noise before decoding, as from then
    on."""
    res = ["res_x", {"num_layers": 1, "inject_noise": noisy}]
    config = LTX_09 | {"timestep_conditioning": timed}
    config |= {"blocks": [res, ["compress_all", 1], ["res_x_y", 1], res, *[["compress_all", 1]] * 2, res]}
    made = comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE(config=config)
    state = randomised(made) | {"per_channel_statistics.std-of-means": torch.linspace(0.5, 1.5, 128)}
    if timed:
        state["decoder.timestep_scale_multiplier"] = torch.tensor(1000.0)
    # What tells ComfyUI the class.
    state.setdefault("decoder.up_blocks.0.res_blocks.0.conv1.conv.weight", torch.empty(0))
    return comfy.sd.VAE(sd=state, metadata={"config": json.dumps({"vae": config})})


def latent(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def patched(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    """As nodes with kernels of their own do: another layer in the place of one, while this VAE is loaded."""
    copied, layer = copy.copy(vae), copy.deepcopy(vae.first_stage_model.decoder.conv_out)
    layer.bias.data += 0.2
    copied.patcher = vae.patcher.clone()
    copied.patcher.add_object_patch("decoder.conv_out", layer)
    return copied


def a_huge_estimate(_shape: tuple[int, ...], _dtype: torch.dtype) -> int:
    return 2**60


def with_a_huge_estimate(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    copied = copy.copy(vae)
    copied.memory_used_decode = a_huge_estimate
    return copied


class Compares:
    """Runs ComfyUI's node and ours, and compares."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def encode(self, vae: comfy.sd.VAE, frames: int, rows: int, columns: int) -> dict[str, Any]:
        pixels = torch.rand(frames, rows, columns, 3, generator=torch.Generator().manual_seed(2))
        ours = self._said("ParallelVAEEncode", pixels, vae, RANKS)
        return self._compared(ours["samples"], nodes.VAEEncode().encode(vae, pixels)[0]["samples"])

    def decode(self, vae: comfy.sd.VAE, samples: torch.Tensor, devices: str = RANKS) -> dict[str, Any]:
        torch.manual_seed(3)  # some draw a little noise
        ours = self._said("ParallelVAEDecode", {"samples": samples}, vae, devices)
        torch.manual_seed(3)
        return self._compared(ours, nodes.VAEDecode().decode(vae, {"samples": samples})[0])

    def _said(self, name: str, given: Any, vae: comfy.sd.VAE, devices: str) -> Any:
        """The node's output. ComfyUI's estimates of memory are for the real widths, some gigabytes which may not be free."""
        from comfy_execution.utils import CurrentNodeContext

        self.recorder.said.clear()
        little = lambda shape, dtype: 1  # noqa: E731
        known = patch.multiple(vae, memory_used_encode=little, memory_used_decode=little)
        if vae.memory_used_decode is a_huge_estimate:  # by which the case goes
            known = contextlib.nullcontext()
        with CurrentNodeContext("prompt", "7"), known:
            return node(name, given, vae, devices)

    def _compared(self, ours: torch.Tensor, whole: torch.Tensor) -> dict[str, Any]:
        return {
            "difference": difference(ours, whole) / float(whole.abs().max()),
            "spread": float(whole.std() / whole.abs().max()),
            "alike": (ours.shape, ours.dtype, ours.device) == (whole.shape, whole.dtype, whole.device),
            "said": self.recorder.said.copy(),
        }

    def cancelled(self, vae: comfy.sd.VAE) -> dict[str, Any] | str:
        """Cancel is pressed; the next decode finds the ranks working."""
        comfy.model_management.interrupt_current_processing(True)
        try:
            node("ParallelVAEDecode", {"samples": latent(1, 16, 5, 16, 16)}, vae, RANKS)
        except comfy.model_management.InterruptProcessingException:
            return self.decode(vae, latent(1, 16, 2, 3, 3))
        return "not cancelled"

    def written_into(self, vae: comfy.sd.VAE) -> dict[str, Any]:
        """A node writes into the weights of a VAE that ranks have."""
        small = latent(1, 4, 4, 4)
        before = node("ParallelVAEDecode", {"samples": small}, vae, RANKS)
        vae.first_stage_model.decoder.conv_out.bias.data += 0.2
        return self.decode(vae, small) | {"changed": difference(before, vae.decode(small))}

    def room_is_made(self, vae: comfy.sd.VAE) -> dict[str, Any]:
        """Models on the ranks make way, and then there is enough."""
        copied, asked = with_a_huge_estimate(vae), []
        room = nodes.NODE_CLASS_MAPPINGS["ParallelVAEDecode"].__module__.rpartition(".")[0] + ".bands"
        kind = type(importlib.import_module(room).registry().models)

        def make_way(_models, _pool, device: str, nbytes: int) -> int:
            asked.append((device, nbytes > 2**59))
            copied.memory_used_decode = lambda shape, dtype: 1
            return nbytes

        with patch.object(kind, "held_on", lambda *_: 2**62), patch.object(kind, "make_way", make_way):
            return self.decode(copied, latent(1, 4, 4, 4)) | {"asked": asked}


def dropped(vaes: list[comfy.sd.VAE]) -> bool:
    """Nothing of ours keeps a VAE alive that nobody else has any more."""
    node("ParallelVAEDecode", {"samples": latent(1, 4, 4, 4)}, vaes[0], THREE)
    seen = weakref.ref(vaes.pop().first_stage_model)
    gc.collect()
    return seen() is None


def main(results: Results) -> None:
    import server  # ComfyUI's; it is found once boot.py is imported

    server.PromptServer.instance = recorder = Recorder()
    compares = Compares(recorder)
    encode, decode = compares.encode, compares.decode
    vae, small = image_vae(4), latent(1, 4, 4, 4)
    results.case("decode without ranks", lambda: decode(vae, small, "auto"))

    prompts = [node("QuickstartPrompt", text) for text in ("3 1", "")]
    empty = torch.zeros(1, 16, 16, 16)
    model = parallel(BUNDLED)
    before = ksampler(model, prompts, empty, steps=1)
    results.case("decode auto, on the model's ranks", lambda: decode(vae, latent(1, 4, 7, 5), "auto"))
    results.case("model after decoding", lambda: difference(before, ksampler(model, prompts, empty, steps=1)))

    results.case("decode Flux, no post_quant_conv", lambda: decode(image_vae(16, post_quant=False), latent(2, 16, 5, 4)))
    results.case("decode Flux.2", lambda: decode(image_vae(32, packed=True), latent(2, 128, 3, 2)))
    results.case("encode SD, odd size", lambda: encode(vae, 2, 45, 37))
    results.case("encode too small", lambda: encode(vae, 1, 8, 8))
    results.case("decode too little memory", lambda: decode(with_a_huge_estimate(vae), small))
    results.case("decode once room is made", lambda: compares.room_is_made(vae))
    results.case("decode written into", lambda: compares.written_into(vae))
    results.case("decode patched", lambda: decode(patched(vae), small))
    results.case("decode with another VAE's layer in it", lambda: decode(vae, small))
    results.case("decode after that", lambda: decode(vae, small))
    tiny = comfy.sd.VAE(sd=randomised(comfy.taesd.taesd.TAESD(latent_channels=4)))
    results.case("decode TAESD", lambda: decode(tiny, small))
    wan, hunyuan, ltx, h3 = wan_vae(), hunyuan_video_vae(), ltx_vae(), h3_vae()
    results.case("encode Wan 2.1", lambda: encode(wan, 9, 40, 24))
    results.case("decode Wan 2.1", lambda: decode(wan, latent(1, 16, 3, 5, 3)))
    results.case("decode Wan, cancelled", lambda: compares.cancelled(wan))
    results.case("decode Qwen-Image Layered, three ranks", lambda: decode(wan_vae(4), latent(2, 16, 1, 5, 3), THREE))
    results.case("encode HunyuanVideo", lambda: encode(hunyuan, 14, 40, 24))
    results.case("decode HunyuanVideo", lambda: decode(hunyuan, latent(1, 16, 4, 5, 3)))
    results.case("encode LTX-Video 0.9", lambda: encode(ltx, 17, 96, 64))
    results.case("decode LTX-Video 0.9", lambda: decode(ltx, latent(1, 128, 3, 3, 2)))
    results.case("decode noisy", lambda: decode(ltx_vae(noisy=True), latent(1, 128, 2, 5, 2)))
    results.case("encode MiniMax H3 in tiles", lambda: encode(h3, 22, 96, 80))
    results.case("decode MiniMax H3 in tiles", lambda: decode(h3, latent(1, 24, 8, 6, 5)))
    results.case("decode MiniMax H3, int8", lambda: decode(h3_vae(quantised=True), latent(1, 24, 8, 6, 5)))
    results.case("wrong channels", lambda: decode(vae, latent(1, 16, 4, 4)))
    results.case("wrong devices", lambda: decode(vae, small, "cpu,tpu"))
    results.case("dropped", lambda: dropped([image_vae(4)]))
    results.case("decode with noise", lambda: decode(ltx_vae(timed=True), latent(1, 128, 2, 5, 2)))
