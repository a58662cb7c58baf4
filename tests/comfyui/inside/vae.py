"""Parallel VAE Decode against the VAE's own decode. Run by serve.py.

VAEs have random weights in the real key layout. Their decoders are a quarter as wide as real ones, but for one.
"""

import copy
import functools
import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from boot import BASE, BUNDLED, Results, comfy, difference, ksampler, node, nodes, parallel, torch
from safetensors.torch import save_file

from testing.quantised import stored

WIDE, NARROW = 128, 32
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
    """In the place of a running server: keeps what nodes say on themselves."""

    def __init__(self):
        self.said: list[tuple[str, str]] = []

    def send_progress_text(self, text: str, node_id: str) -> None:
        self.said.append((node_id, text))

    def send_sync(self, event: str, data: dict[str, str]) -> None:
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


def wan22_vae() -> comfy.sd.VAE:
    made = comfy.ldm.wan.vae2_2.WanVAE
    small = lambda **config: made(**config | {"dim": 8, "dec_dim": 16})  # noqa: E731
    sizes = {"z_dim": 48, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}
    with patch.object(comfy.ldm.wan.vae2_2, "WanVAE", small):
        return comfy.sd.VAE(sd=randomised(small(**sizes)))


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


def latent(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Decodes:
    """Runs both nodes and compares."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __call__(self, vae: comfy.sd.VAE, samples: torch.Tensor, devices: str = "cpu,cpu"):
        from comfy_execution.utils import CurrentNodeContext

        self.recorder.said.clear()
        with CurrentNodeContext("prompt", "7"):
            ours = node("ParallelVAEDecode", {"samples": samples}, vae, devices)
        whole = nodes.VAEDecode().decode(vae, {"samples": samples})[0]
        return {
            "difference": difference(ours, whole),
            "clamped": float(((whole == 0) | (whole == 1)).float().mean()),
            "spread": float(whole.std()),
            "alike": (ours.shape, ours.dtype, ours.device) == (whole.shape, whole.dtype, whole.device),
            "said": self.recorder.said.copy(),
        }


def cancelled(vae: comfy.sd.VAE, samples: torch.Tensor, decodes: Decodes, next_ones: torch.Tensor):
    """Cancel is pressed; the next decode finds the ranks working."""
    comfy.model_management.interrupt_current_processing(True)
    try:
        node("ParallelVAEDecode", {"samples": samples}, vae, "cpu,cpu")
    except comfy.model_management.InterruptProcessingException:
        return decodes(vae, next_ones)
    return "not cancelled"


def changed_by_a_node(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    """As nodes for seamless textures do: a copy whose convolutions wrap around."""
    copied = copy.deepcopy(vae)
    for module in copied.first_stage_model.modules():
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size == (3, 3):
            module.padding_mode, module._reversed_padding_repeated_twice = "circular", (1, 1, 1, 1)
    return copied


def written_into(vae: comfy.sd.VAE, decodes: Decodes):
    """A node writes into the weights of a VAE that ranks have."""
    small = latent(1, 4, 4, 4)
    before = node("ParallelVAEDecode", {"samples": small}, vae, "cpu,cpu")
    vae.first_stage_model.decoder.conv_out.bias.data += 0.2
    after = decodes(vae, small)
    return after | {"changed": difference(before, vae.decode(small))}


def patched(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    """As nodes with kernels of their own do: another layer in the place of one, while this VAE is loaded."""
    copied, layer = copy.copy(vae), copy.deepcopy(vae.first_stage_model.decoder.conv_out)
    layer.bias.data += 0.2
    copied.patcher = vae.patcher.clone()
    copied.patcher.add_object_patch("decoder.conv_out", layer)
    return copied


def shares_its_model(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    """With one that has a patch, which is in their weights since that one was used."""
    copied = copy.copy(vae)
    copied.patcher = vae.patcher.clone()
    name = "decoder.conv_out.bias"
    copied.patcher.add_patches({name: ("diff", (torch.ones_like(vae.get_sd()[name]),))}, 0.2)
    copied.decode(latent(1, 4, 4, 4))
    return vae


def a_huge_estimate(_shape: tuple[int, ...], _dtype: torch.dtype) -> int:
    return 2**60


def with_a_huge_estimate(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    copied = copy.copy(vae)
    copied.memory_used_decode = a_huge_estimate
    return copied


def room_is_made(vae: comfy.sd.VAE, decode: Callable[[comfy.sd.VAE], dict[str, Any]]) -> dict[str, Any]:
    """Models on the ranks make way, and then there is enough."""
    copied, asked = with_a_huge_estimate(vae), []
    room = nodes.NODE_CLASS_MAPPINGS["ParallelVAEDecode"].__module__.rpartition(".")[0] + ".bands"
    kind = type(importlib.import_module(room).registry())

    def make_way(_registry, _pool, device: str, nbytes: int) -> int:
        asked.append((device, nbytes > 2**59))
        copied.memory_used_decode = lambda shape, dtype: 1
        return nbytes

    with patch.object(kind, "held_on", lambda *_: 2**62), patch.object(kind, "make_way", make_way):
        return decode(copied) | {"asked": asked}


def dropped(vaes: list[comfy.sd.VAE]) -> bool:
    """Nothing of ours keeps a VAE alive that nobody else has any more."""
    node("ParallelVAEDecode", {"samples": latent(1, 4, 4, 4)}, vaes[0], "cpu,cpu,cpu")
    seen = weakref.ref(vaes.pop().first_stage_model)
    gc.collect()
    return seen() is None


def main(results: Results) -> None:
    import server  # ComfyUI's; it is found once boot.py is imported

    server.PromptServer.instance = recorder = Recorder()
    decodes = Decodes(recorder)
    vae, small = image_vae(4), latent(1, 4, 4, 4)
    (BASE / "models" / "vae").mkdir(exist_ok=True)
    save_file(vae.get_sd(), BASE / "models" / "vae" / "random.safetensors")
    results.case("no ranks", lambda: decodes(vae, small, "auto"))

    prompts = [node("QuickstartPrompt", text) for text in ("3 1", "")]
    empty = torch.zeros(1, 16, 16, 16)
    model = parallel(BUNDLED)
    before = ksampler(model, prompts, empty, steps=1)
    results.case("auto, on the model's ranks", lambda: decodes(vae, latent(1, 4, 7, 5), "auto"))
    results.case("model after decoding", lambda: difference(before, ksampler(model, prompts, empty, steps=1)))
    results.case("another model", lambda: ksampler(parallel(BUNDLED, pipe=1, batch=2), prompts, empty, steps=1).std().item())
    results.case("auto, after another model was loaded", lambda: decodes(vae, small, "auto"))

    results.case("SD, real width", lambda: decodes(image_vae(4, WIDE), latent(1, 4, 9, 6)))
    results.case("Flux, no post_quant_conv, batch 2", lambda: decodes(image_vae(16, post_quant=False), latent(2, 16, 5, 4)))
    results.case("Flux.2, batch 2", lambda: decodes(image_vae(32, packed=True), latent(2, 128, 3, 2)))
    results.case("a latent with one frame", lambda: decodes(vae, small[:, :, None]))
    results.case("cancelled", lambda: cancelled(vae, latent(1, 4, 16, 16), decodes, small))

    results.case("too little memory", lambda: decodes(with_a_huge_estimate(vae), small))
    results.case("room is made", lambda: room_is_made(vae, lambda short: decodes(short, small)))
    results.case("too few rows", lambda: decodes(vae, latent(1, 4, 1, 1)))
    circular = changed_by_a_node(vae)
    results.case("changed", lambda: decodes(circular, small))
    results.case("what the change does", lambda: difference(circular.decode(small), vae.decode(small)))
    results.case("written into", lambda: written_into(vae, decodes))
    results.case("patched", lambda: decodes(patched(vae), small))
    results.case("another VAE's patch in its weights", lambda: decodes(shares_its_model(vae), small))
    results.case("after that", lambda: decodes(vae, small))
    tiny = comfy.sd.VAE(sd=randomised(comfy.taesd.taesd.TAESD(latent_channels=4)))
    results.case("TAESD", lambda: decodes(tiny, small))
    wan = wan_vae()
    results.case("Wan 2.1", lambda: decodes(wan, latent(1, 16, 3, 5, 3)))
    results.case("Wan 2.1, columns, batch 2, three ranks", lambda: decodes(wan, latent(2, 16, 2, 2, 4), "cpu,cpu,cpu"))
    results.case("Qwen-Image, batch 2", lambda: decodes(wan, latent(2, 16, 1, 5, 4)))
    results.case("Wan 2.2", lambda: decodes(wan22_vae(), latent(1, 48, 2, 3, 2)))
    results.case("Wan, cancelled", lambda: cancelled(wan, latent(1, 16, 5, 16, 16), decodes, latent(1, 16, 2, 3, 3)))
    results.case("Qwen-Image Layered", lambda: decodes(wan_vae(4), latent(1, 16, 1, 3, 3)))
    h3 = h3_vae()
    results.case("MiniMax H3", lambda: decodes(h3, latent(1, 24, 8, 6, 5)))
    results.case("MiniMax H3, one frame, batch 2, three ranks", lambda: decodes(h3, latent(2, 24, 1, 5, 3), "cpu,cpu,cpu"))
    results.case("MiniMax H3, int8", lambda: decodes(h3_vae(quantised=True), latent(1, 24, 8, 6, 5)))
    results.case("wrong channels", lambda: decodes(vae, latent(1, 16, 4, 4)))
    results.case("wrong devices", lambda: decodes(vae, small, "cpu,tpu"))
    results.case("three ranks, batch 3", lambda: decodes(vae, latent(3, 4, 11, 5), "cpu,cpu,cpu"))
    results.case("dropped", lambda: dropped([image_vae(4)]))
