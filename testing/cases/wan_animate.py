"""Wan 2.2 Animate: a pose video and a video of a face. ComfyUI's motion encoder has one size, which is a large one."""

from dataclasses import dataclass

import diffusers
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.families.parts.wan import PROMPT
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
ANIMATE = WAN | {
    "num_layers": 5,
    "latent_channels": 16,
    "motion_encoder_size": 16,
    "motion_encoder_channel_sizes": {"16": 6, "8": 8, "4": 10},
    "motion_style_dim": 12,
    "motion_dim": 4,
    "motion_encoder_dim": 12,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 4,
    "inject_face_latents_blocks": 5,
}
WHOLE = ANIMATE | {
    "motion_encoder_size": 512,
    "motion_encoder_channel_sizes": dict(zip(("512", "256", "128", "64"), (32, 64, 128, 256), strict=True))
    | dict.fromkeys(("32", "16", "8", "4"), 512),
    "motion_style_dim": 512,
    "motion_dim": 20,
    "motion_encoder_dim": 512,
    "face_encoder_hidden_dim": 1024,
}


def _name_in_diffusers(config, parameter):
    match parameter.split("."):
        case ["patch_embedding", stream, leaf]:
            return f"{'pose_' if stream == 'pose' else ''}patch_embedding.{leaf}"
        case ["faces", *rest]:
            return ".".join(rest)
        case ["blocks", index, "face", *rest]:
            return ".".join(["face_adapter", str(int(index) // config["inject_face_latents_blocks"]), *rest])
        case _:
            return parameter


def of_diffusers(model):
    """diffusers' class with the weights of the family's."""
    config = dict(model.config)
    theirs = diffusers.WanAnimateTransformer3DModel(**{key: config[key] for key in ANIMATE}).eval()
    theirs.load_state_dict({_name_in_diffusers(config, key): value for key, value in model.state_dict().items()})
    return theirs


def _tensors(generator, batch):
    def random(*shape):
        return torch.randn(batch, *shape, generator=generator)

    return {
        "context": random(PROMPT, ANIMATE["text_dim"]),
        "picture": random(5, ANIMATE["image_dim"]),
        "faces": random(3, 9, 16, 16),
    }


def _reference(model, x, timestep, tensors):
    """As WanAnimatePipeline calls it."""
    return of_diffusers(model)(
        hidden_states=x,
        timestep=timestep,
        encoder_hidden_states=tensors["context"],
        encoder_hidden_states_image=tensors["picture"],
        pose_hidden_states=tensors["pose"],
        face_pixel_values=tensors["faces"],
        return_dict=False,
    )[0]


def _adjust(model):
    """The motion encoder's layers divide their weights by the root of the inputs: theirs are as large as those are."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.faces.motion_encoder.parameters():
            value.copy_(torch.randn(value.shape, generator=generator))


def _conditioning(generator):
    def random(*shape):
        return torch.randn(1, *shape, generator=generator)

    extras = {
        "concat_latent_image": random(16, 3, 8, 6),
        "concat_mask": torch.rand(1, 1, 3, 8, 6, generator=generator),
        "clip_vision_output.penultimate_hidden_states": random(5, 1280),
        "pose_video_latent": random(16, 1, 8, 6),
        "face_video_pixels": random(3, 1, 512, 512),
    }
    return random(PROMPT, ANIMATE["text_dim"]), extras


@dataclass(frozen=True)
class Animated(Case):
    """The pose is as large as the latent, whose size a test may change."""

    def inputs(self, batch=2, latent=None, seed=1):
        x, timestep, tensors = super().inputs(batch, latent, seed)
        sizes = (16, x.shape[2] - 1, *x.shape[3:])
        pose = torch.randn(batch, *sizes, generator=torch.Generator().manual_seed(seed))
        return x, timestep, tensors | {"pose": pose}

    def save(self, model, path, config=None):
        """Biases of the motion encoder are pictures of one pixel there."""
        super().save(model, path, config)
        state = load_file(path)
        for key, value in state.items():
            if ".net_app." in key and key.endswith(".bias"):
                state[key] = value.view(1, -1, 1, 1)
        save_file(state, path)
        return path


def _case(name, **others):
    return Animated(
        name=name,
        family="wan-animate",
        config=ANIMATE,
        latent=(36, 4, 12, 10),
        odd=None,
        tensors=_tensors,
        reference=_reference,
        timestep=700.0,
        adjust=_adjust,
        sampled=False,
        **others,
    )


CASES = (
    _case("wan-2.2-animate"),
    _case(
        "wan-2.2-animate-whole",
        full=True,
        native=Native(WHOLE, _conditioning, (16, 3, 8, 6), detected={"text_dim": ANIMATE["text_dim"]}),
    ),
)
