"""Configurations of tiny models that ComfyUI builds too."""

from testing import tiny

FLUX = tiny.FLUX | {
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}
"""Like tiny.FLUX, of a width that ComfyUI's model detection takes: a multiple of 128 with rotary axes (16, 56, 56)."""
