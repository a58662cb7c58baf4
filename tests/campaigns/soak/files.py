"""The files that the requests name, below a base directory of ComfyUI: random ones and the bundled model."""

import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from parallel_backend.quickstart.model import WEIGHTS
from testing import mini
from tests.comfyui import standins

from .requests import CONTROL_IMAGE, CONTROL_NET, LORA, VAES
from .setups import DIGITS, FILES, FLUX_DEV, PIXART

WIDTH, RANK = 256, 4
"""Of both Flux-like models; of the LoRA."""
CONVOLUTIONS = 8
"""Of a Flux ControlNet's way from pixels to tokens, each followed by a SiLU."""


def write(base: Path) -> None:
    """All of them: 60 MB."""
    kinds = ("diffusion_models", "text_encoders", "vae", "loras", "controlnet")
    transformers, encoders, vaes, loras, controls = (base / "models" / kind for kind in kinds)
    inputs = base / "input"
    for folder in (transformers, encoders, vaes, loras, controls, inputs):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(WEIGHTS, transformers / FILES[DIGITS])
    flux = standins.FLUX | {"guidance": True}
    mini.save(mini.random_model(flux), transformers / FILES[FLUX_DEV])
    save_file(standins.pixart(), transformers / FILES[PIXART])
    save_file(standins.clip(layers=12), encoders / "clip_l.safetensors")
    save_file(standins.t5(), encoders / "t5xxl_fp8_e4m3fn.safetensors")
    save_file(standins.vae(channels=16), vaes / VAES[16])
    quant = {"post_quant_conv.weight": torch.eye(4)[:, :, None, None], "post_quant_conv.bias": torch.zeros(4)}
    save_file(standins.vae(channels=4) | quant, vaes / VAES[4])
    save_file(lora(), loras / LORA)
    save_file(control_net(), controls / CONTROL_NET)
    rows, columns = np.mgrid[0:128, 0:128]
    Image.fromarray(np.stack([rows * 2, columns * 2, rows ^ columns], -1).astype(np.uint8)).save(inputs / CONTROL_IMAGE)


def lora() -> standins.Tensors:
    """For a layer of the first stage and one of the second."""
    random = standins.Random()
    for layer, columns in {"double_blocks.0.img_attn.proj": WIDTH, "single_blocks.1.linear2": 5 * WIDTH}.items():
        random.weight(f"diffusion_model.{layer}.lora_A", RANK, columns)
        random.weight(f"diffusion_model.{layer}.lora_B", WIDTH, RANK)
    return random.tensors


def control_net() -> standins.Tensors:
    """In XLabs' layout: the bundled model's first block, and random layers before and behind it."""
    first = ("img_in", "txt_in", "time_in", "vector_in", "double_blocks")
    found = {key: value.float() for key, value in load_file(WEIGHTS).items() if key.startswith(first)}
    random = standins.Random()
    for index in range(CONVOLUTIONS):
        random.layer(f"input_hint_block.{2 * index}", 16, 3 if index == 0 else 16, 3, 3)
    random.layer("pos_embed_input", WIDTH, 64)
    random.layer("controlnet_blocks.0", WIDTH, WIDTH)
    return found | random.tensors
