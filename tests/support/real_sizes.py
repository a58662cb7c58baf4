"""Model files with the shapes of real ones. Only the header is written: the values are a hole that takes no disk."""

import json
import struct
from pathlib import Path

import torch

from parallel_backend.checkpoints.checkpoint import to_original
from parallel_backend.families import FAMILIES
from parallel_backend.rank.stage.meta_model import meta_model

FLUX_DEV = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}


def save_header(path: Path, config: dict = FLUX_DEV, family: str = "flux") -> Path:
    """A bf16 file of this model, in its original layout; all values read as 0."""
    with torch.device("meta"):
        state = meta_model(FAMILIES[family], config).state_dict()
        shapes = {name: tuple(value.shape) for name, value in to_original(FAMILIES[family], config, state).items()}
    header, start = {}, 0
    for name, shape in shapes.items():
        stop = start + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + start)
    return path
