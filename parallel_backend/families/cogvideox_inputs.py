"""What CogVideoX's class is called with: positions, and ComfyUI's conditioning."""

from typing import Any

import torch

from parallel_backend.families.base.step_inputs import Config, StepInputs
from parallel_backend.families.parts.conditioning import rotary_table, text


def _sides(grid: tuple[int, ...], config: Config) -> list[torch.Tensor]:
    """Positions along frames, rows, columns. Those of 1.0 fill the middle of the training size's grid, in its proportions.

    From diffusers' pipeline_cogvideox.py: get_resize_crop_region_for_grid, and get_3d_rotary_pos_embed's grid types.
    """
    frames, rows, columns = grid
    if config["patch_size_t"] is not None:
        return [torch.arange(float(size)) for size in grid]
    height, width = (config["sample_height"] // 2, config["sample_width"] // 2)
    tall = rows / columns > height / width
    used = (height, round(height / rows * columns)) if tall else (round(width / columns * rows), width)
    sides = [torch.arange(float(frames))]
    for count, whole, part in zip((rows, columns), (height, width), used, strict=True):
        start = round((whole - part) / 2)
        sides.append(torch.linspace(start, (start + part) * (count - 1) / count, count))
    return sides


def _rotary(step: StepInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, head] of all image tokens, in the class's order."""
    head, positions = config["attention_head_dim"], torch.cartesian_prod(*_sides(step.grid, config))
    table = rotary_table(positions.to(step.timestep.device), (head // 4, head // 8 * 3, head // 8 * 3), 10000.0)
    return table.real.repeat_interleave(2, 1), table.imag.repeat_interleave(2, 1)


def arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return {
        "hidden_states": step.x.transpose(1, 2),
        "encoder_hidden_states": step.text_tensor("context", config["text_embed_dim"]),
        "timestep": step.timestep,
        "ofs": step.tensors.get("ofs"),
        "image_rotary_emb": _rotary(step, config) if config["use_rotary_positional_embeddings"] else None,
    }


def conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    context = text("CogVideoX", config["text_embed_dim"], given)
    needed = config["max_text_seq_length"]
    if not config["use_rotary_positional_embeddings"] and context.shape[1] != needed:
        raise ValueError(
            f"positive, negative: the prompt has {context.shape[1]} tokens, this model needs {needed}. Encode a shorter one "
            "with a CLIPLoader of type cogvideox, which fills it up to that."
        )
    return {"context": context} | ({"ofs": given["ofs"]} if config["ofs_embed_dim"] else {})


def example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    tokens = text_tokens if config["use_rotary_positional_embeddings"] else config["max_text_seq_length"]
    offset = {"ofs": torch.full((1,), 2.0)} if config["ofs_embed_dim"] else {}
    return {"context": torch.randn(1, tokens, config["text_embed_dim"])} | offset
