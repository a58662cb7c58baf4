"""Parallel VAE Decode against the VAE's own decode. Run by serve.py.

VAEs have random weights in the real key layout. Their decoders are a quarter as wide as real ones, but for one.
"""

import copy
import gc
import weakref

from boot import BASE, BUNDLED, Results, comfy, difference, ksampler, node, nodes, parallel, torch
from safetensors.torch import save_file

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


def randomised(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights that keep the pixels within what process_output does not clamp, mostly; statistics are no round numbers."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, tensor in model.state_dict().items():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 16
        values = torch.randn(tensor.shape, generator=generator) * 0.7 / fan_in**0.5
        positive = "var" in name or ("norm" in name and name.endswith("weight"))
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


def cancelled(vae: comfy.sd.VAE, decodes: Decodes):
    """Cancel is pressed; the next decode finds the ranks working."""
    comfy.model_management.interrupt_current_processing(True)
    try:
        node("ParallelVAEDecode", {"samples": latent(1, 4, 16, 16)}, vae, "cpu,cpu")
    except comfy.model_management.InterruptProcessingException:
        return decodes(vae, latent(1, 4, 4, 4))
    return "not cancelled"


def changed_by_a_node(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    """As nodes for seamless textures do: a copy whose convolutions wrap around."""
    copied = copy.deepcopy(vae)
    for module in copied.first_stage_model.modules():
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size == (3, 3):
            module.padding_mode, module._reversed_padding_repeated_twice = "circular", (1, 1, 1, 1)
    return copied


def with_a_huge_estimate(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    copied = copy.copy(vae)
    copied.memory_used_decode = lambda shape, dtype: 2**60
    return copied


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
    results.case("cancelled", lambda: cancelled(vae, decodes))

    results.case("too little memory", lambda: decodes(with_a_huge_estimate(vae), small))
    results.case("too few rows", lambda: decodes(vae, latent(1, 4, 1, 4)))
    circular = changed_by_a_node(vae)
    results.case("changed", lambda: decodes(circular, small))
    results.case("what the change does", lambda: difference(circular.decode(small), vae.decode(small)))
    tiny = comfy.sd.VAE(sd=randomised(comfy.taesd.taesd.TAESD(latent_channels=4)))
    results.case("TAESD", lambda: decodes(tiny, small))
    wan = comfy.ldm.wan.vae.WanVAE(dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True])
    video = comfy.sd.VAE(sd=randomised(wan))
    results.case("Wan", lambda: decodes(video, latent(1, 16, 2, 4, 4)))
    results.case("wrong channels", lambda: decodes(vae, latent(1, 16, 4, 4)))
    results.case("wrong devices", lambda: decodes(vae, small, "cpu,tpu"))
    results.case("three ranks, batch 3", lambda: decodes(vae, latent(3, 4, 11, 5), "cpu,cpu,cpu"))
    results.case("dropped", lambda: dropped([image_vae(4)]))
