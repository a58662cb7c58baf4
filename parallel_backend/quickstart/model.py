"""Configuration of the bundled quickstart model, a `diffusers.FluxTransformer2DModel` of 6.7 M parameters."""

from pathlib import Path
from typing import Any

MODEL_CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,  # 16 latent channels x 2x2 packing
    "num_layers": 1,  # double-stream blocks
    "num_single_layers": 4,
    "attention_head_dim": 128,
    "num_attention_heads": 2,  # hidden width 256
    "joint_attention_dim": 32,  # width of a text token, see prompt.py
    "pooled_projection_dim": 16,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}

WEIGHTS = Path(__file__).with_name("quickstart-digits.safetensors")
