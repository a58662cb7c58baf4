"""Emulated cards for ComfyUI's model management, which takes cpu:0 and cpu:1 for GPUs with so many bytes.

Models on the cards are computed on the CPU. ComfyUI's code decides which model has to make room, and how much.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import torch
from comfy.text_encoders.t5 import T5

CARDS = torch.device("cpu", 0), torch.device("cpu", 1)


@contextmanager
def cards(size: int, held: Callable[[torch.device], int]) -> Iterator[Callable[[torch.device], int]]:
    """Context in which ComfyUI runs on the first card. `held`: bytes of a card that encoders and ranks have. Gives a
    function of a card's free bytes."""

    def free(device: torch.device) -> int:
        return size - held(device)

    def free_memory(device: torch.device | None = None, torch_free_too: bool = False) -> Any:
        nbytes = free(device or CARDS[0])
        return (nbytes, 0) if torch_free_too else nbytes

    patches = {
        "get_torch_device": lambda: CARDS[0],
        "get_free_memory": free_memory,
        "is_device_cpu": lambda device: torch.device(device).index is None,
        "minimum_inference_memory": lambda: 0,
        "EXTRA_RESERVED_VRAM": 0,
        "vram_state": management.VRAMState.NORMAL_VRAM,
        "current_loaded_models": [],
    }
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(patch.object(management, name, value))
        yield free


@contextmanager
def spoiled(file: Path) -> Iterator[None]:
    """Context in which the values of a safetensors file are NaN. Its header, size and time of writing are unchanged: a
    program that reads it again, and does not look at its time of change, computes other results."""
    state, kept = file.stat(), file.with_suffix(".kept")
    shutil.copy(file, kept)
    with file.open("r+b") as data:
        header = 8 + int.from_bytes(data.read(8), "little")
        data.seek(header)
        for _ in range(header, state.st_size, 1 << 20):
            data.write(b"\xff" * min(1 << 20, state.st_size - data.tell()))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    try:
        yield
    finally:
        with kept.open("rb") as good, file.open("r+b") as data:
            shutil.copyfileobj(good, data)
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
        kept.unlink()


class Encoder:
    """A text encoder made of ComfyUI's classes, with `layers` layers, 0.66 MB each, on `card`."""

    def __init__(self, card: torch.device, layers: int):
        config = {"d_ff": 256, "d_kv": 32, "d_model": 128, "num_layers": layers, "num_heads": 4, "vocab_size": 32}
        config |= {"dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True, "model_type": "t5"}
        self.model = T5(config, torch.float32, "cpu", comfy.ops.manual_cast)
        g = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=g) * 0.05
            parameter.requires_grad_(False)
        self.card = card
        self.patcher = comfy.model_patcher.ModelPatcher(self.model, load_device=card, offload_device=torch.device("cpu"))

    def bytes_on(self, card: torch.device) -> int:
        """Bytes of the encoder's weights."""
        return self.patcher.loaded_size() if card == self.card else 0

    def __call__(self, words: list[int]) -> torch.Tensor:
        """[1, words, 64], as ComfyUI's CLIP does it: onto its card, then the forward."""
        management.load_models_gpu([self.patcher])
        return self.model(torch.tensor([words]), None, dtype=torch.float32)[0][..., :64].float()
