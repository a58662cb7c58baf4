"""Arguments of a model call as ComfyUI gives them to a family, in the small sizes of its cases; what becomes of each."""

from collections.abc import Iterator
from typing import Any

import torch

from parallel_backend.families.own_class.family import OwnClassFamily
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
        needed = (*NEEDED.get(family.name, ()), *BELONGS.get(name, ()), name)
        yield config, call | {each: values[each] for each in needed if each in values}


NEEDED = {"seedvr2": ("condition",)}
"""Family -> arguments that ComfyUI's model always gives."""
BELONGS = {
    "ref_latents_method": ("ref_latents",),
    "image_slots": ("ref_latents",),
    "pose_strength": ("pose_latents",),
    "context_pose": ("pose_latents",),
    "clip_fea_pose": ("pose_latents", "clip_fea"),
}
"""Argument -> others that it says something of."""


def _text_width(config: Any) -> int:
    names = ("context_in_dim", "joint_attention_dim", "text_dim", "in_text_dim", "text_in_dim", "cross_attention_dim")
    found = next(config[name] for name in names if name in config)
    return found if isinstance(found, int) else found[0]


def _words(config: Any) -> int:
    return config.get("text_len", WORDS)


def _values(config: Any, latent: tuple[int, ...]) -> Call:
    """A value for each argument that some family takes. None of them is one that changes nothing."""
    frames, (rows, columns) = latent[1] if len(latent) == 4 else 1, latent[-2:]
    masked = torch.ones(1, _words(config), dtype=torch.bool)
    masked[:, -1] = False

    def video(of: int, count: int = frames) -> torch.Tensor:
        return torch.full((1, of, count, rows // 2 * 2, columns // 2 * 2), 0.5)

    return {
        "y": torch.ones(1, 8),
        "attention_mask": masked,
        "ref_latents": [torch.ones(1, latent[0], *((1,) if len(latent) == 4 else ()), 4, 4)] * 2,
        "ref_latents_method": "negative_index",
        "image_slots": [1, 3],
        "clip_fea": torch.ones(1, config.get("pos_embed_seq_len") or 257, config.get("image_embed_dim") or CLIP_WIDTH),
        "clip_fea_pose": torch.full((1, config.get("pos_embed_seq_len") or 257, CLIP_WIDTH), 2.0),
        "context_pose": torch.full((1, WORDS, config.get("text_dim", 1)), 2.0),
        "pose_latents": video(16, max(1, frames - 1)),
        "pose_strength": 0.5,
        "reference_strength": 0.5,
        "face_pixel_values": torch.ones(1, 3, 4, *[config.get("motion_encoder_size", 1)] * 2),
        "condition": video(config["in_channels"] - config["out_channels"]) if "separate_layers" in config else None,
    }
