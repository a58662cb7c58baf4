"""Layouts of LoRA files as they are published, by names and shapes, for a tiny Flux: what ComfyUI loads of each.

A row is a layer in one layout. To add one, append a Row to ROWS. tests/comfyui/test_lora_layouts.py holds it to ComfyUI.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

WIDTH, RANK = 256, 4
PROJ, QKV, LINEAR1 = (
    "double_blocks.0.img_attn.proj.weight",
    "double_blocks.0.img_attn.qkv.weight",
    "single_blocks.0.linear1.weight",
)


def kohya(layer: str) -> dict[str, torch.Tensor]:
    """sd-scripts, LyCORIS and OneTrainer, without alpha."""
    return {f"{layer}.lora_up.weight": torch.ones(WIDTH, RANK), f"{layer}.lora_down.weight": torch.ones(RANK, WIDTH)}


def peft(layer: str, infix: str = "") -> dict[str, torch.Tensor]:
    return {
        f"{layer}.lora_B{infix}.weight": torch.ones(WIDTH, RANK),
        f"{layer}.lora_A{infix}.weight": torch.ones(RANK, WIDTH),
    }


@dataclass(frozen=True)
class Row:
    """A published layout."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    loaded: tuple[str, ...] = (PROJ,)
    """Weights of the model that ComfyUI patches. Empty: it drops the whole file, and only logs its names."""
    metadata: Mapping[str, str] | None = None


ALPHA = {"lora_unet_double_blocks_0_img_attn_proj.alpha": torch.tensor(2.0)}
DORA = {"lora_unet_double_blocks_0_img_attn_proj.dora_scale": torch.ones(WIDTH, 1)}
BLOCK, SINGLE = "transformer_blocks.0.attn", "single_transformer_blocks.0"
RS_LORA = {"ss_network_args": '{"rs_lora": "True"}'}
ROWS = (
    Row("sd-scripts", kohya("lora_unet_double_blocks_0_img_attn_proj") | ALPHA),
    Row("sd-scripts without alpha", kohya("lora_unet_double_blocks_0_img_attn_proj")),
    Row("sd-scripts with dora_scale", kohya("lora_unet_double_blocks_0_img_attn_proj") | ALPHA | DORA),
    Row("sd-scripts with rs_lora in its header", kohya("lora_unet_double_blocks_0_img_attn_proj") | ALPHA, metadata=RS_LORA),
    Row(
        "sd-scripts with a text encoder",
        kohya("lora_unet_double_blocks_0_img_attn_proj") | kohya("lora_te1_text_model_encoder_layers_0_mlp_fc1"),
    ),
    Row("diffusers and ai-toolkit", peft(f"transformer.{BLOCK}.to_out.0")),
    Row("diffusers, a part of a fused layer", peft(f"transformer.{BLOCK}.to_q"), (QKV,)),
    Row("diffusers, a part of a single block", peft(f"transformer.{SINGLE}.attn.to_k"), (LINEAR1,)),
    Row("diffusers without a prefix", peft(f"{BLOCK}.to_out.0")),
    Row("diffusers, of peft's default adapter", peft(f"transformer.{BLOCK}.to_out.0", ".default")),
    Row("ComfyUI's names", peft("diffusion_model.double_blocks.0.img_attn.proj")),
    Row("ComfyUI's names, up and down", kohya("diffusion_model.double_blocks.0.img_attn.proj")),
    Row("ComfyUI's names, of peft's default adapter", peft("diffusion_model.double_blocks.0.img_attn.proj", ".default")),
    Row("ComfyUI's names without a prefix", peft("double_blocks.0.img_attn.proj"), ()),
    Row("peft's names", peft(f"base_model.model.{BLOCK}.to_out.0"), ()),
    Row("OneTrainer", kohya("lora_transformer_transformer_blocks_0_attn_to_out_0")),
    Row("SimpleTuner's LyCORIS", kohya("lycoris_transformer_blocks_0_attn_to_out_0")),
    Row("LyCORIS full", {"lycoris_transformer_blocks_0_attn_to_out_0.diff": torch.ones(WIDTH, WIDTH)}),
    Row(
        "XLabs",
        {
            f"double_blocks.0.processor.proj_lora1.{side}.weight": each
            for side, each in (("up", torch.ones(WIDTH, RANK)), ("down", torch.ones(RANK, WIDTH)))
        },
        (),
    ),
    Row(
        "biases of peft",
        peft(f"transformer.{BLOCK}.to_out.0") | {f"transformer.{BLOCK}.to_out.0.lora_B.bias": torch.ones(WIDTH)},
    ),
    Row("another model's", peft("diffusion_model.blocks.0.self_attn.q"), ()),
)
