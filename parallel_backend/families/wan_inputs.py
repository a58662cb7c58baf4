"""What Wan's models are given beside the latent: text, CLIP's view of pictures, a time for each frame."""

from typing import Any

import torch

from parallel_backend.families.base.step_inputs import Config, StepInputs
from parallel_backend.families.parts.conditioning import text

PROMPT = 512
"""Tokens of text that the class expects behind a picture's, to which ComfyUI's encoder for Wan pads."""


def conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, text_dim] and, for models with layers for it, `picture` [B, P, image_dim]: CLIP's tokens.

    ValueError for text that the class cannot tell from the picture, and for CLIP output of another model.
    """
    context, picture = text("Wan", config["text_dim"], given), given.get("clip_fea")
    if config["image_dim"] is None:
        return {"context": context}  # the native model ignores the picture as well
    if context.shape[1] != PROMPT:
        raise ValueError(
            f"positive, negative: this model needs prompts of {PROMPT} tokens, this one has {context.shape[1]}. Shorten it, "
            "and do not concatenate conditionings."
        )
    if picture is None:  # the native model then takes the text in the picture's place too
        return {"context": torch.cat((context, context), dim=1)}
    tokens = config["pos_embed_seq_len"] or picture.shape[1]
    if picture.shape[1:] != (tokens, config["image_dim"]):
        raise ValueError(
            f"positive, negative: the CLIP vision output has {picture.shape[1]} tokens of {picture.shape[2]}, this model "
            f"needs {tokens} of {config['image_dim']}. Use clip_vision_h, and both a first and a last picture if the model "
            "was made for them."
        )
    return {"context": context, "picture": picture}


def arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    """The class's call for one micro-step."""
    picture, time = step.tensors.get("picture"), step.timestep
    if picture is not None and config["pos_embed_seq_len"] is not None:  # the class takes first and last as a batch
        picture = picture.reshape(2 * len(picture), -1, picture.shape[-1])
    if time.ndim == 2:  # of each frame; the class takes one of each token
        time = time.repeat_interleave(torch.Size(step.grid[1:]).numel(), dim=1)
    return {
        "hidden_states": step.x,
        "timestep": time,
        "encoder_hidden_states": step.tensors["context"],
        "encoder_hidden_states_image": picture,
    }


def example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    """Random values for what `conditioning` gives, of batch 1."""
    tokens = text_tokens if config["image_dim"] is None else 2 * PROMPT
    return {"context": torch.randn(1, tokens, config["text_dim"])}
