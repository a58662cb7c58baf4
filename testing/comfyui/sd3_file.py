"""A small SD 3.5 with random values, as the single file that ComfyUI reads."""

from pathlib import Path

import torch
from safetensors.torch import save_file

LATENT_CHANNELS, PATCH, TIME_FEATURES, HEAD, MLP_RATIO = 16, 2, 256, 64, 4


def write(path: Path, text: int = 64, pooled: int = 32, depth: int = 3, side: int = 40) -> Path:
    """`depth`: blocks, and heads, as ComfyUI's detection counts both. `text`, `pooled`: widths of the prompt's tensors.
    `side`: of the table of positions."""
    width, g, tensors = HEAD * depth, torch.Generator().manual_seed(0), {}

    def layer(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(shape, generator=g) * 0.7 / torch.Size(shape[1:]).numel() ** 0.5
        tensors[f"{name}.bias"] = 0.1 * torch.randn(shape[0], generator=g)

    layer("x_embedder.proj", width, LATENT_CHANNELS, PATCH, PATCH)
    layer("context_embedder", width, text)
    for name, features in {"t_embedder": TIME_FEATURES, "y_embedder": pooled}.items():
        layer(f"{name}.mlp.0", width, features)
        layer(f"{name}.mlp.2", width, width)
    tensors["pos_embed"] = torch.randn(1, side**2, width, generator=g)
    for index in range(depth):
        for stream in ("x_block", "context_block"):
            ends = stream == "context_block" and index == depth - 1  # text's last block only makes keys and values
            block = f"joint_blocks.{index}.{stream}"
            layer(f"{block}.adaLN_modulation.1", (2 if ends else 6) * width, width)
            layer(f"{block}.attn.qkv", 3 * width, width)
            for norm in ("ln_q", "ln_k"):
                tensors[f"{block}.attn.{norm}.weight"] = 1 + 0.1 * torch.randn(HEAD, generator=g)
            if not ends:
                layer(f"{block}.attn.proj", width, width)
                layer(f"{block}.mlp.fc1", MLP_RATIO * width, width)
                layer(f"{block}.mlp.fc2", width, MLP_RATIO * width)
    layer("final_layer.linear", LATENT_CHANNELS * PATCH**2, width)
    layer("final_layer.adaLN_modulation.1", 2 * width, width)
    save_file(tensors, path)
    return path
