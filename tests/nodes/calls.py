"""Arguments of a model call as ComfyUI gives them to a family, in the small sizes of its cases; what becomes of each."""

from collections.abc import Iterator
from typing import Any

import torch

from parallel_backend.families import Family
from testing.cases import all_cases

Call = dict[str, Any]
DETECTED = {"use_layer3d_rope": False, "zero_cond_t": False}
"""Constructor arguments that a file's keys decide, and that not every case states."""
WORDS = 512
"""Of the prompt, so that models that look at a picture too take it."""
CLIP_WIDTH = 1280


def passes(family: Family, name: str) -> bool:
    """Whether the tensors for the ranks depend on this argument, in a call of any of the family's cases."""
    return any(
        tensors(family, config, call) != tensors(family, config, without(call, name)) for config, call in with_(family, name)
    )


def refuses(family: Family, name: str) -> bool:
    """Whether this argument's value is refused, with an error that names the input, in all of the family's cases."""
    found = [tensors(family, config, call) for config, call in with_(family, name)]
    return all(isinstance(each, str) and each.startswith("positive, negative: ") for each in found)


def tensors(family: Family, config: Any, call: Call) -> Any:
    """Values of the tensors for the ranks, to compare; the text of an error."""
    try:
        found = family.inputs.conditioning(config, call)
    except (ValueError, KeyError) as error:
        return str(error)
    return {name: (tuple(tensor.shape), tensor.float().flatten().tolist()) for name, tensor in found.items()}


def without(call: Call, name: str) -> Call:
    return {key: value for key, value in call.items() if key != name}


def with_(family: Family, name: str) -> Iterator[tuple[Any, Call]]:
    """(constructor arguments, arguments) of a call with this argument, and with those without which it means nothing."""
    for case in (case for case in all_cases() if case.family == family.name):
        config = DETECTED | case.config
        values = _values(config, case.latent)
        call = {"context": torch.ones(1, _words(config), _text_width(config)), "latent": (1, *case.latent), "y": values["y"]}
        if family.patching.video:
            call |= {"grid": family.patching.grid((1, *case.latent))}
        needed = [*NEEDED.get(family.name, ()), *BELONGS.get(name, ()), name]
        if config.get("guidance_embeds"):
            needed.append("guidance")
        call |= {each: values[each] for each in needed if each in values}
        yield config, call


NEEDED = {
    "seedvr2": ("condition",),
}
"""Family -> arguments that ComfyUI's model always gives."""
BELONGS = {
    "disable_time_r": ("sigmas", "sample_sigmas"),
    "sigmas": ("sample_sigmas",),
    "sample_sigmas": ("sigmas",),
    "ref_latents": ("ref_latents_method",),
    "ref_latents_method": ("ref_latents",),
    "image_slots": ("ref_latents",),
    "pose_strength": ("pose_latents",),
    "context_pose": ("pose_latents",),
    "clip_fea_pose": ("pose_latents", "clip_fea"),
}
"""Argument -> others that it says something of."""


NAMES_OF_FEW = ("text_in_dim", "cap_feat_dim", "context_in_dim", "cross_attention_dim")


def _text_width(config: Any) -> int:
    if "num_text_layers" in config:
        return config["num_text_layers"] * config["text_hidden_dim"]
    names = ("joint_attention_dim", "text_embed_dim", "text_dim", "in_text_dim", "llm_features_dim", "caption_channels")
    found = next(config[name] for name in (*names, *NAMES_OF_FEW) if name in config)
    return found if isinstance(found, int) else found[0]


def _words(config: Any) -> int:
    return config.get("text_len", config.get("max_text_seq_length", WORDS))


def _values(config: Any, latent: tuple[int, ...]) -> Call:
    """A value for each argument that some family takes. None of them is one that changes nothing."""
    frames, (rows, columns) = latent[1] if len(latent) == 4 else 1, latent[-2:]
    channels = config.get("out_channels") or 16
    pooled = next((config[name] for name in ("pooled_projection_dim", "in_text_dim2", "text_emb_dim") if name in config), 8)
    masked = torch.ones(1, _words(config), dtype=torch.bool)
    masked[:, -1] = False
    caption = config.get("caption_channels")

    def video(of: int, count: int = frames) -> torch.Tensor:
        return torch.full((1, of, count, rows // 2 * 2, columns // 2 * 2), 0.5)

    return {
        "y": torch.ones(1, pooled),
        "guidance": torch.full((1,), 3.5),
        "attention_mask": masked,
        "ref_latents": [torch.ones(1, latent[0], *((1,) if len(latent) == 4 else ()), 4, 4)] * 2,
        "ref_latents_method": "negative_index",
        "image_slots": [1, 3],
        "encoder_hidden_states_llama3": torch.ones(1, 5, 4, caption[1] if isinstance(caption, tuple) else 1),
        "image_cond": torch.ones(1, *latent),
        "text_embedding_mask": torch.ones(1, _words(config)),
        "encoder_hidden_states_t5": torch.ones(1, config.get("text_len_t5", 1), config.get("cross_attention_dim_t5", 1)),
        "text_embedding_mask_t5": torch.ones(1, config.get("text_len_t5", 1)),
        "image_meta_size": torch.ones(1, 6),
        "c_size": torch.ones(1, 2),
        "c_ar": torch.ones(1, 1),
        "ofs": torch.ones(1),
        "disable_time_r": True,
        "sigmas": torch.full((1,), 0.5),
        "sample_sigmas": torch.tensor((1.0, 0.5, 0.2, 0.0)),
        "fps": torch.full((1,), 12.0),
        "denoise_mask": torch.full((1, 1, frames, rows, columns), 0.5),
        "num_tokens": 5,
        "clip_text_pooled": torch.ones(1, pooled),
        "txt_byt5": torch.ones(1, 4, config.get("text_embed_2_dim") or 1),
        "clip_fea": torch.ones(1, config.get("pos_embed_seq_len") or 257, config.get("image_embed_dim") or CLIP_WIDTH),
        "clip_fea_pose": torch.full((1, config.get("pos_embed_seq_len") or 257, CLIP_WIDTH), 2.0),
        "context_pose": torch.full((1, WORDS, config.get("text_dim", 1)), 2.0),
        "context_latents": [torch.ones(1, config.get("in_channels", 1), 1, 4, 4)],
        "reference_latent": torch.ones(1, 16, 4, 4),
        "pose_latents": video(16, max(1, frames - 1)),
        "pose_strength": 0.5,
        "reference_strength": 0.5,
        "face_pixel_values": torch.ones(1, 3, 4, *[config.get("motion_encoder_size", 1)] * 2),
        "condition": video(config["in_channels"] - config["out_channels"]) if "separate_layers" in config else None,
        "camera_conditions": video(config.get("control_channels", 1)),
        "time_dim_replace": torch.ones(1, channels, 1, rows, columns),
    }
