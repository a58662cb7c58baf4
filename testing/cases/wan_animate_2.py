"""Wan Animate 2: every frame attends to its frame of a pose video. The header tells a file from Wan's."""

import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from parallel_backend.families.wan_animate_2 import PROMPT
from testing.cases.case import Case, Native

# Heads are 128 wide in every Wan, so two of them are the smallest model.
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "in_channels": 36,
    "out_channels": 16,
    "text_dim": 24,
    "freq_dim": 256,
    "ffn_dim": 96,
    "num_layers": 3,
    "cross_attn_norm": True,
    "image_dim": 1280,
    "added_kv_proj_dim": 256,
    "rope_max_seq_len": 1024,
}
POSE = 6
"""Tokens of CLIP's picture of the pose. The video has as many."""


def _tensors(generator, batch):
    def random(*shape):
        return torch.randn(batch, *shape, generator=generator)

    return {
        "context": random(PROMPT, WAN["text_dim"]),
        "picture": random(POSE, WAN["image_dim"]),
        "reference": torch.full((batch,), 0.8),
        "pose_context": random(PROMPT, WAN["text_dim"]),
        "pose_picture": random(POSE, WAN["image_dim"]),
        "pose_strength": torch.full((batch,), 0.7),
    }


def _reference(model, x, timestep, tensors):
    """The forward of the family's class, which tests/comfyui compares with ComfyUI's."""
    height, width = x.shape[-2:]
    out = model(
        hidden_states=F.pad(x, (0, width % 2, 0, height % 2, 0, 0), mode="circular"),
        timestep=timestep,
        encoder_hidden_states=tensors["context"],
        encoder_hidden_states_image=tensors["picture"],
        pose=tensors["pose"],
        block_inputs={
            "reference": tensors["reference"],
            "text": tensors["pose_context"],
            "picture": tensors["pose_picture"],
            "strength": tensors["pose_strength"],
        },
    )[0]
    return out[..., :height, :width]


def _conditioning(generator):
    def random(*shape):
        return torch.randn(1, *shape, generator=generator)

    extras = {
        "concat_latent_image": random(16, 4, 7, 6),
        "concat_mask": torch.rand(1, 1, 4, 7, 6, generator=generator),
        "clip_vision_output.penultimate_hidden_states": random(POSE, 1280),
        "clip_vision_output_pose.penultimate_hidden_states": random(POSE, 1280),
        "cross_attn_pose": random(PROMPT, WAN["text_dim"]),
        "pose_video_latent": random(16, 3, 7, 6),
        "pose_strength": 0.7,
        "reference_strength": 0.8,
    }
    return random(PROMPT, WAN["text_dim"]), extras


@dataclass(frozen=True)
class Posed(Case):
    """The pose is as large as the latent, whose size a test may change; the header says which model it is."""

    def inputs(self, batch=2, latent=None, seed=1):
        x, timestep, tensors = super().inputs(batch, latent, seed)
        frames, height, width = x.shape[2:]
        sizes = (16, frames - 1, height + height % 2, width + width % 2)
        pose = torch.randn(batch, *sizes, generator=torch.Generator().manual_seed(seed))
        return x, timestep, tensors | {"pose": pose}

    def save(self, model, path, config=None):
        super().save(model, path, config)
        save_file(load_file(path), path, {"config": json.dumps({"transformer": {"model_type": "animate2"}})})
        return path


CASES = (
    Posed(
        name="wan-animate-2",
        family="wan-animate-2",
        config=WAN,
        latent=(36, 4, 12, 10),
        odd=(36, 4, 11, 9),
        tensors=_tensors,
        reference=_reference,
        timestep=700.0,
        sampled=False,
        native=Native(WAN, _conditioning, (16, 4, 7, 6), detected={"text_dim": WAN["text_dim"]}),
    ),
)
