"""Parallel VAE Decode against the VAE's own decode. Run by ComfyUI's Python, see inside.py.

VAEs have random weights in the real key layout. Their decoders are a quarter as wide as real ones, but for one.
"""

import copy
import weakref

from inside import BUNDLED, Results, comfy, difference, ksampler, load_pack, node, nodes, parallel, torch

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
        state[name] = values.abs() + 0.5 if "norm" in name and name.endswith("weight") or "var" in name else values
    return state


def image_vae(channels: int, width: int = NARROW, post_quant: bool = True, packed: bool = False) -> comfy.sd.VAE:
    """As Load VAE makes it."""
    wide = DDCONFIG | {"ch": WIDE, "z_channels": channels, "batch_norm_latent": packed}
    model = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=wide, decoder_ddconfig=wide | {"ch": width}, embed_dim=channels)
    state = randomised(model)
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


def main() -> None:
    load_pack()
    import server  # ComfyUI's; it is found once inside.py is imported

    results = Results()
    server.PromptServer.instance = recorder = Recorder()
    decodes = Decodes(recorder)
    four = image_vae(4)

    results.case("no ranks", lambda: decodes(four, latent(1, 4, 4, 4), "auto"))
    results.case("SD, real width", lambda: decodes(image_vae(4, WIDE), latent(1, 4, 9, 6)))
    results.case("SD, three ranks, batch 3", lambda: decodes(four, latent(3, 4, 11, 5), "cpu,cpu,cpu"))
    results.case("Flux, no post_quant_conv", lambda: decodes(image_vae(16, post_quant=False), latent(2, 16, 5, 4)))
    results.case("Flux.2", lambda: decodes(image_vae(32, packed=True), latent(2, 128, 3, 2)))
    results.case("a latent with one frame", lambda: decodes(four, latent(1, 4, 1, 4, 4)))

    prompts = [node("QuickstartPrompt", text) for text in ("3 1", "")]
    empty = torch.zeros(1, 16, 16, 16)
    model = parallel(BUNDLED)
    before = ksampler(model, prompts, empty, steps=2)
    results.case("on the model's ranks", lambda: decodes(four, latent(1, 4, 6, 6), "auto"))
    results.case("model after decoding", lambda: difference(before, ksampler(model, prompts, empty, steps=2)))
    other = ksampler(parallel(BUNDLED, pipe=1, batch=2), prompts, empty, steps=2)
    results.case("another model", lambda: difference(before, other))
    results.case("after another model", lambda: decodes(four, latent(1, 4, 6, 6), "auto"))
    results.case("cancelled", lambda: cancelled(four, decodes))

    small = copy.copy(four)
    small.memory_used_decode = lambda shape, dtype: 2**60
    results.case("too little memory", lambda: decodes(small, latent(1, 4, 4, 4)))
    results.case("too few rows", lambda: decodes(four, latent(1, 4, 1, 4)))
    circular = copy.deepcopy(four)
    for module in circular.first_stage_model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.padding_mode = "circular"
            module._reversed_padding_repeated_twice = (1, 1, 1, 1) if module.kernel_size == (3, 3) else (0, 0, 0, 0)
    results.case("circular", lambda: decodes(circular, latent(1, 4, 4, 4)))
    results.case("circular differs", lambda: difference(*(v.decode(latent(1, 4, 4, 4)) for v in (circular, four))))
    tiny = comfy.sd.VAE(sd=randomised(comfy.taesd.taesd.TAESD(latent_channels=4)))
    results.case("TAESD", lambda: decodes(tiny, latent(1, 4, 4, 4)))
    wan = comfy.ldm.wan.vae.WanVAE(dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True])
    video = comfy.sd.VAE(sd=randomised(wan))
    results.case("Wan", lambda: decodes(video, latent(1, 16, 2, 4, 4)))
    results.case("wrong channels", lambda: decodes(four, latent(1, 16, 4, 4)))
    results.case("wrong devices", lambda: decodes(four, latent(1, 4, 4, 4), "cpu,tpu"))
    seen = weakref.ref(four.first_stage_model)
    del four, small, circular
    results.case("the VAE can be dropped", lambda: seen() is None)
    results.write()


if __name__ == "__main__":
    main()
