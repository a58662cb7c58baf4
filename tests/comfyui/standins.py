"""Files under the names that the bundled workflows use, and a text encoder and a VAE in the layouts of the real ones."""

import json
from pathlib import Path

import torch
from PIL import Image

from scripts.comfyui_server import PACK
from scripts.graphs.published import NOT_PUBLISHED
from testing import mini

Tensors = dict[str, torch.Tensor]
CLIP_WIDTH = 64


def write(models: Path) -> None:
    """Every file below ComfyUI's `models` folder, which only lists them; that of Flux.1 dev can be read too."""
    for path in (PACK / "workflows").glob("*.json"):
        for node in json.loads(path.read_text())["nodes"]:
            for model in node["properties"].get("models", ()):
                (models / model["directory"]).mkdir(parents=True, exist_ok=True)
                (models / model["directory"] / model["name"]).touch()
    for name in NOT_PUBLISHED:
        folder = "loras" if "style" in name else "diffusion_models"
        (models / folder / name).touch()
    Image.new("RGB", (64, 64), "teal").save(models.parent / "input" / "example.png")
    (models.parent / "input" / "example.mp4").touch()
    mini.save(mini.random_model(mini.IN_COMFYUI | {"guidance": True}), models / "diffusion_models" / "flux1-dev.safetensors")


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


def clip() -> Tensors:
    """transformers' CLIPTextModelWithProjection, as clip_l files have it."""
    width, random = CLIP_WIDTH, Random()
    random.weight("text_model.embeddings.token_embedding", 49408, width, scale=1.0)
    random.weight("text_model.embeddings.position_embedding", 77, width, scale=0.1)
    for index in range(12):
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
