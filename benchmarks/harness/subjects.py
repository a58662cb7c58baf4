"""Models to measure: their shapes, a file of random weights of them, and the inputs of a run.

The others get the same weights as a diffusers folder (rivals/diffusers_flux.py), the same tensors go into all of them, and
the same Euler steps from sigma 1 to 0 are made; the timestep that a model is given is sigma itself.
"""

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.rivals import diffusers_flux
from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.proven_class import prompt_for_class
from parallel_backend.client.sampling import Predict, Prompt
from parallel_backend.core.dtypes import TORCH_DTYPES
from parallel_backend.own_class.built.building import build
from parallel_backend.quickstart.mini_flux import PATCH
from parallel_backend.quickstart.model import mini_flux
from testing import mini

WEIGHTS = "model.safetensors"
STORED = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
SEED, CHANNELS = 1, 16


@dataclass(frozen=True)
class Subject:
    """A model's shape and the size of its picture: `side` latent pixels square, `text` tokens, guided where `cfg` > 1.

    `config`: arguments of the mini class (quickstart/mini_flux.py). With guidance every call has a batch of two, the
    negative and the positive prompt. `steps`: those of a run. `reduced`: what of a real model has been left out, in words.
    """

    name: str
    config: dict[str, Any]
    side: int
    text: int
    cfg: float = 1.0
    steps: int = 20
    dtype: str = "fp32"
    reduced: str = ""

    @property
    def width(self) -> int:
        return self.config["width"]

    @property
    def heads(self) -> int:
        return self.width // sum(self.config["axes"])

    @property
    def blocks(self) -> tuple[int, int]:
        return self.config["double_blocks"], self.config["single_blocks"]

    @property
    def latent(self) -> tuple[int, ...]:
        """Shape of one picture's."""
        return CHANNELS, self.side, self.side

    @property
    def tokens(self) -> int:
        """Of the picture."""
        return (self.side // PATCH) ** 2

    @property
    def entries(self) -> int:
        """Of the batch of one picture's model call."""
        return 1 if self.cfg == 1.0 else 2

    def __str__(self) -> str:
        blocks = " + ".join(map(str, self.blocks))
        guided = f", guidance {self.cfg:g} (batch of 2)" if self.cfg > 1 else ""
        return (
            f"{self.name}, random weights, hidden {self.width}, {blocks} blocks, {self.tokens} image + {self.text} text "
            f"tokens, {self.dtype}{guided}" + (f"; {self.reduced}" if self.reduced else "")
        )

    def at(
        self, side: int | None = None, layers: int | None = None, steps: int | None = None, heads: int | None = None
    ) -> "Subject":
        """The same with a smaller picture, fewer blocks, attention heads (so narrower) or steps, and says so."""
        side, steps = side or self.side, steps or self.steps
        config, cut = dict(self.config), []
        if layers and layers != sum(self.blocks):
            doubles = max(1, layers // 3)
            config |= {"double_blocks": doubles, "single_blocks": layers - doubles}
            cut.append(f"{layers} of {sum(self.blocks)} blocks")
        if heads and heads != self.heads:
            cut.append(f"{heads} of {self.heads} heads")
            config["width"] = heads * sum(config["axes"])
        if side != self.side:
            cut.append(f"{side * 8} instead of {self.side * 8} pixels square")
        if steps != self.steps:
            cut.append(f"{steps} instead of {self.steps} steps")
        reduced = f"reduced: {', '.join(cut)}" if cut else self.reduced
        return replace(self, config=config, side=side, steps=steps, reduced=reduced)

    def save(self, folder: Path) -> Path:
        """The file, in this folder. Random weights, written tensor by tensor, so that no more than one is ever in memory."""
        folder.mkdir(exist_ok=True)
        shapes, at, header = build(mini_flux(**self.config)).state_dict(), 0, {}
        for name, value in shapes.items():
            size = value.numel() * TORCH_DTYPES[self.dtype].itemsize
            header[name] = {"dtype": STORED[self.dtype], "shape": list(value.shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        generator = torch.Generator().manual_seed(0)
        with (folder / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, shape in ((name, value.shape) for name, value in shapes.items()):
                values = mini.drawn(name, shape, generator)
                file.write(values.to(TORCH_DTYPES[self.dtype]).flatten().view(torch.uint8).numpy())
        return folder / WEIGHTS

    @contextmanager
    def saved(self) -> Iterator[Path]:
        """A temporary file with random weights, for as long as the context lasts."""
        with TemporaryDirectory() as folder:
            yield self.save(Path(folder))

    def opened(self, path: Path, tensor: int = 1) -> Checkpoint:
        """The file's checkpoint, with a call of this size for plans. `tensor`: see mini.opened."""
        return mini.opened(path, tensor, height=self.side, width=self.side, text=self.text)

    def for_others(self, path: Path) -> Path:
        """The file's weights as a diffusers folder beside it."""
        return diffusers_flux.save_folder(path, self.config, path.with_name("diffusers"))

    def problem(self, pictures: int = 1) -> tuple[torch.Tensor, Prompt]:
        """Noise [B, C, side, side] and prompts by the names of the class's arguments, fp32 on the CPU, always the same."""
        generator = torch.Generator().manual_seed(SEED)
        x = torch.randn(pictures, *self.latent, generator=generator)
        prompts = [self._tensors(pictures, generator) for _ in range(self.entries)]
        return x, Prompt(prompts[0], prompts[-1], self.cfg)

    def problem_of_ranks(self, pictures: int = 1) -> tuple[torch.Tensor, Prompt]:
        """The same, with prompts as ranks get them."""
        x, prompt = self.problem(pictures)
        return x, prompt_for_class(prompt)

    def _tensors(self, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            "context": torch.randn(batch, self.text, self.config["context_width"], generator=generator),
            "pooled": torch.randn(batch, self.config["pooled_width"], generator=generator),
        }

    def load(self, path: Path, device: str = "cpu") -> torch.nn.Module:
        """diffusers' own model, loaded by diffusers from the folder beside the file."""
        from diffusers import FluxTransformer2DModel

        loader, dtype = FluxTransformer2DModel.from_pretrained, TORCH_DTYPES[self.dtype]
        model = loader(path.with_name("diffusers"), torch_dtype=dtype, low_cpu_mem_usage=False)
        return model.to(device).eval().requires_grad_(False)

    def predict(self, model: torch.nn.Module) -> Predict:
        """diffusers' own forward on a latent, in the model's dtype, wherever the model is. Latents stay fp32."""
        parameter = next(model.parameters())

        @torch.inference_mode()
        def predict(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            place: Callable[[torch.Tensor], torch.Tensor] = lambda value: value.to(parameter.device, parameter.dtype)  # noqa: E731
            given = {name: place(value) for name, value in tensors.items()}
            return diffusers_flux.forward(model, place(x), place(timestep), given).to(x)

        return predict


def _config(doubles: int, singles: int, width: int, context: int, pooled: int, axes: tuple) -> dict[str, Any]:
    return {
        "context_width": context,
        "pooled_width": pooled,
        "width": width,
        "axes": axes,
        "double_blocks": doubles,
        "single_blocks": singles,
        "guidance": False,
    }


def _like(doubles: int, singles: int) -> dict[str, Any]:
    return _config(doubles, singles, 512, 64, 64, (8, 28, 28))


FLUX_LIKE = Subject("Flux-like", _like(2, 4), side=64, text=32)
GUIDED_FLUX_LIKE = Subject("Flux-like guided", _like(2, 4), side=48, text=32, cfg=4.5)
DEEPEST_FLUX_LIKE = Subject("Flux-like", _like(4, 8), side=64, text=32)
"""Twelve blocks: enough for stages that are cut unevenly, and for a loading that takes seconds."""

DEEPER_FLUX_LIKE = Subject("Flux-like", _like(2, 6), side=64, text=32)
"""Enough blocks for eight stages."""

FLUX_SCHNELL = Subject("Flux-schnell shapes", _config(19, 38, 3072, 4096, 768, (16, 56, 56)), side=128, text=256, steps=4)
