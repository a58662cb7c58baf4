"""The files that the requests name, below a base directory of ComfyUI: random ones and the bundled model."""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from parallel_backend.quickstart.model import WEIGHTS
from testing import mini
from tests.comfyui import standins

from .requests import LORA, VAE
from .setups import DIGITS, FILES, FLUX_DEV

WIDTH, RANK = 256, 4
"""Of both Flux-like models; of the LoRA."""


def write(base: Path) -> None:
    """All of them: 60 MB."""
    kinds = ("diffusion_models", "text_encoders", "vae", "loras")
    transformers, encoders, vaes, loras = (base / "models" / kind for kind in kinds)
    for folder in (transformers, encoders, vaes, loras):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(WEIGHTS, transformers / FILES[DIGITS])
    mini.save(mini.random_model(standins.FLUX | {"guidance": True}), transformers / FILES[FLUX_DEV])
    save_file(standins.clip(layers=12), encoders / "clip_l.safetensors")
    save_file(standins.t5(), encoders / "t5xxl_fp8_e4m3fn.safetensors")
    save_file(standins.vae(channels=16), vaes / VAE)
    save_file(lora(), loras / LORA)


def lora() -> standins.Tensors:
    """For a layer of the first stage and one of the second."""
    random = standins.Random()
    for layer, columns in {"double_blocks.0.img_attn.proj": WIDTH, "single_blocks.1.linear2": 5 * WIDTH}.items():
        random.weight(f"diffusion_model.{layer}.lora_A", RANK, columns)
        random.weight(f"diffusion_model.{layer}.lora_B", WIDTH, RANK)
    return random.tensors
