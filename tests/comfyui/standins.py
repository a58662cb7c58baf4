"""Tiny random files under the names that the bundled workflows use, in the key layouts of the real ones.

Transformers are diffusers' own classes. A VAE is a decoder alone and a quarter as wide, which ComfyUI reads from it.
Text encoders have the real number of layers and vocabulary; `tiny_encoders` makes ComfyUI read their widths.
"""

from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

from testing import mini
from testing.comfyui import sd3_file

Tensors = dict[str, torch.Tensor]
ENCODERS_PACK = Path(__file__).parent / "tiny_encoders"
CLIP_WIDTH, T5_WIDTH = 64, 16
T5_OUTPUT = 4096
"""What `tiny_encoders` pads T5's output to."""
FLUX = mini.IN_COMFYUI | {
    "context_width": T5_OUTPUT,
    "pooled_width": CLIP_WIDTH,
    "double_blocks": 1,
    "single_blocks": 2,
}


PLACEHOLDERS = {  # of workflows that are not run with files: ComfyUI only lists them
    "diffusion_models": (
        "PixArt-Sigma-XL-2-2K-MS",
        "krea2_turbo_fp8_scaled",
        "flux2_dev_fp8mixed",
        "z_image_turbo_bf16",
        "qwen_image_edit_2511_fp8mixed",
        "qwen_image_2.1_int8_convrot",
        "wan2.2_t2v_high_noise_14B_fp8_scaled",
        "wan2.2_t2v_low_noise_14B_fp8_scaled",
        "minimax_h3_fl2va_pruned_int8_convrot",
        "fastvideo_fasth3_8step_v2_pruned_int8_convrot",
    ),
    "checkpoints": ("ltx-2.3-22b-distilled-fp8",),
    "text_encoders": (
        "qwen3vl_4b_fp8_scaled",
        "mistral_3_small_flux2_fp8",
        "qwen_3_4b",
        "qwen_2.5_vl_7b_fp8_scaled",
        "qwen3vl_8b_int8_convrot",
        "umt5_xxl_fp8_e4m3fn_scaled",
        "gemma_3_12B_it_fp4_mixed",
        "qwen3vl_32b_minimax_h3_nvfp4_awq",
    ),
    "vae": (
        "qwen_image_vae",
        "flux2-vae",
        "qwen_image_2.1_vae_bf16",
        "wan_2.1_vae",
        "minimax_h3_video_vae_fp16",
        "minimax_h3_audio_vae_fp32",
    ),
}


def write(models: Path) -> None:
    """All files, below ComfyUI's `models` folder: 150 MB, mostly vocabularies and the projection of 4,096-wide text."""
    for folder, names in PLACEHOLDERS.items():
        (models / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (path := models / folder / f"{name}.safetensors").exists():
                path.touch()
    Image.new("RGB", (64, 64), "teal").save(models.parent / "input" / "example.png")
    transformers, encoders, vaes = (models / name for name in ("diffusion_models", "text_encoders", "vae"))
    for folder in (transformers, encoders, vaes):
        folder.mkdir(parents=True, exist_ok=True)
    for name, guidance in {"flux1-schnell": False, "flux1-dev": True}.items():
        config = FLUX | {"guidance": guidance}
        mini.save(mini.random_model(config), transformers / f"{name}.safetensors")
    (models / "loras").mkdir(exist_ok=True)
    layer, width = "diffusion_model.double_blocks.0.img_attn.proj", FLUX["width"]
    lora = {f"{layer}.lora_A.weight": torch.ones(4, width), f"{layer}.lora_B.weight": torch.ones(width, 4)}
    save_file(lora, models / "loras" / "flux_style.safetensors")
    sd3_file.write(transformers / "sd3.5_large.safetensors", T5_OUTPUT, 2 * CLIP_WIDTH)
    save_file(clip(layers=12), encoders / "clip_l.safetensors")
    save_file(clip(layers=32), encoders / "clip_g.safetensors")
    save_file(t5(), encoders / "t5xxl_fp8_e4m3fn.safetensors")
    for name in ("ae", "sd3.5_vae"):
        save_file(vae(channels=16), vaes / f"{name}.safetensors")
    save_file(vae(channels=4) | {"post_quant_conv.weight": torch.eye(4)[:, :, None, None]}, vaes / "sdxl_vae.safetensors")


class Random:
    """Layers' tensors by the layer's name. Weights keep the size of what runs through them."""

    def __init__(self):
        self.tensors: Tensors = {}
        self._generator = torch.Generator().manual_seed(0)

    def weight(self, name: str, *shape: int, scale: float | None = None) -> None:
        scale = scale or torch.Size(shape[1:]).numel() ** -0.5
        self.tensors[f"{name}.weight"] = torch.randn(shape, generator=self._generator) * scale

    def layer(self, name: str, *shape: int) -> None:
        self.weight(name, *shape)
        self.tensors[f"{name}.bias"] = torch.zeros(shape[0])

    def norm(self, name: str, width: int, bias: bool = True) -> None:
        self.tensors[f"{name}.weight"] = torch.ones(width)
        if bias:
            self.tensors[f"{name}.bias"] = torch.zeros(width)


def clip(layers: int) -> Tensors:
    """transformers' CLIPTextModelWithProjection, as clip_l and clip_g files have it."""
    width, random = CLIP_WIDTH, Random()
    random.weight("text_model.embeddings.token_embedding", 49408, width, scale=1.0)
    random.weight("text_model.embeddings.position_embedding", 77, width, scale=0.1)
    for index in range(layers):
        layer = f"text_model.encoder.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            random.layer(f"{layer}.self_attn.{name}", width, width)
        random.layer(f"{layer}.mlp.fc1", 2 * width, width)
        random.layer(f"{layer}.mlp.fc2", width, 2 * width)
        random.norm(f"{layer}.layer_norm1", width)
        random.norm(f"{layer}.layer_norm2", width)
    random.norm("text_model.final_layer_norm", width)
    random.weight("text_projection", width, width)
    return random.tensors


def t5() -> Tensors:
    """T5-XXL's encoder in fp8. ComfyUI knows it by block 23 and a feed-forward of 10,240, so it has both."""
    width, hidden, random = T5_WIDTH, 10240, Random()
    random.weight("shared", 32128, width, scale=1.0)
    random.weight("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", 32, 1, scale=1.0)
    for index in range(24):
        attention, feed_forward = (f"encoder.block.{index}.layer.{part}" for part in (0, 1))
        for name in ("q", "k", "v", "o"):
            random.weight(f"{attention}.SelfAttention.{name}", width, width)
        for name in ("wi_0", "wi_1"):
            random.weight(f"{feed_forward}.DenseReluDense.{name}", hidden, width)
        random.weight(f"{feed_forward}.DenseReluDense.wo", width, hidden)
        random.norm(f"{attention}.layer_norm", width, bias=False)
        random.norm(f"{feed_forward}.layer_norm", width, bias=False)
    random.norm("encoder.final_layer_norm", width, bias=False)
    return {name: tensor.to(torch.float8_e4m3fn) for name, tensor in random.tensors.items()}


def vae(channels: int) -> Tensors:
    """The decoder of Stable Diffusion's and Flux's VAE with `channels` latent ones: 32 to 128 wide, not 128 to 512."""
    base, random = 32, Random()
    top = 4 * base

    def block(name: str, before: int, after: int) -> None:
        random.norm(f"{name}.norm1", before)
        random.layer(f"{name}.conv1", after, before, 3, 3)
        random.norm(f"{name}.norm2", after)
        random.layer(f"{name}.conv2", after, after, 3, 3)
        if before != after:
            random.layer(f"{name}.nin_shortcut", after, before, 1, 1)

    random.layer("decoder.conv_in", top, channels, 3, 3)
    block("decoder.mid.block_1", top, top)
    random.norm("decoder.mid.attn_1.norm", top)
    for name in ("q", "k", "v", "proj_out"):
        random.layer(f"decoder.mid.attn_1.{name}", top, top, 1, 1)
    block("decoder.mid.block_2", top, top)
    width = top
    for level, factor in reversed(tuple(enumerate((1, 2, 4, 4)))):
        for index in range(3):
            block(f"decoder.up.{level}.block.{index}", width, factor * base)
            width = factor * base
        if level:
            random.layer(f"decoder.up.{level}.upsample.conv", width, width, 3, 3)
    random.norm("decoder.norm_out", width)
    random.layer("decoder.conv_out", 3, width, 3, 3)
    return random.tensors
