"""Models to measure: their shapes, random weights of them as a diffusers folder, and the inputs of a run.

The same folder is read by every competitor, the same tensors go into it, and the same Euler steps from sigma 1 to 0 are
made with it; the timestep that a model is given is sigma itself.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from parallel_backend.client.sampling import Predict, Prompt
from parallel_backend.core.dtypes import TORCH_DTYPES
from parallel_backend.families import FAMILIES
from parallel_backend.families.base.family import Family

WEIGHTS = "diffusion_pytorch_model.safetensors"
STORED = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
SEED = 1


@dataclass(frozen=True)
class Subject:
    """A model's shape and the size of its picture: `side` latent pixels square, `text` tokens, guided where `cfg` > 1.

    With guidance every call has a batch of two, the negative and the positive prompt. `steps`: those of a run.
    `reduced`: what of a real model has been left out, in words.
    """

    name: str
    family_name: str
    config: dict[str, Any]
    side: int
    text: int
    cfg: float = 1.0
    steps: int = 20
    dtype: str = "fp32"
    reduced: str = ""

    @property
    def family(self) -> Family:
        return FAMILIES[self.family_name]

    @property
    def width(self) -> int:
        return self.config["num_attention_heads"] * self.config["attention_head_dim"]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(self.config[name] for name in ("num_layers", "num_single_layers") if name in self.config)

    @property
    def tokens(self) -> int:
        """Of the picture; of a video's one frame."""
        return math.prod(self.family.patching.grid((1, 1, 1, self.side, self.side)))

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
            doubles = layers if len(self.blocks) == 1 else max(1, layers // 3)
            config |= {"num_layers": doubles} | ({"num_single_layers": layers - doubles} if len(self.blocks) > 1 else {})
            cut.append(f"{layers} of {sum(self.blocks)} blocks")
        if heads and heads != config["num_attention_heads"]:
            cut.append(f"{heads} of {config['num_attention_heads']} heads")
            config["num_attention_heads"] = heads
            if "cross_attention_dim" in config:
                config["cross_attention_dim"] = heads * config["attention_head_dim"]
        if side != self.side:
            cut.append(f"{side * 8} instead of {self.side * 8} pixels square")
        if steps != self.steps:
            cut.append(f"{steps} instead of {self.steps} steps")
        reduced = f"reduced: {', '.join(cut)}" if cut else self.reduced
        return replace(self, config=config, side=side, steps=steps, reduced=reduced)

    def save(self, folder: Path) -> Path:
        """Random weights, written tensor by tensor, so that no more than one is ever in memory."""
        with torch.device("meta"):
            model = self.family.transformer_class()(**self.config)
        model.save_config(folder)
        shapes, at, header = model.state_dict(), 0, {}
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
                values = torch.randn(shape, generator=generator)
                # As testing/tiny.py has it: every part of the model shows in its output.
                values = values * 0.7 / shape[1:].numel() ** 0.5 if len(shape) > 1 else values * 0.1 + ("norm_" in name)
                file.write(values.to(TORCH_DTYPES[self.dtype]).flatten().view(torch.uint8).numpy())
        return folder

    @contextmanager
    def saved(self) -> Iterator[Path]:
        """A temporary folder with random weights, for as long as the context lasts."""
        with TemporaryDirectory() as folder:
            yield self.save(Path(folder))

    def bytes(self, folder: Path) -> int:
        return (folder / WEIGHTS).stat().st_size

    def problem(self, pictures: int = 1) -> tuple[torch.Tensor, Prompt]:
        """Noise [B, C, side, side] and prompts, fp32 on the CPU, the same every time."""
        generator = torch.Generator().manual_seed(SEED)
        x = torch.randn(pictures, self.family.sizes.latent_channels(self.config), self.side, self.side, generator=generator)
        prompts = [self._tensors(pictures, generator) for _ in range(self.entries)]
        return x, Prompt(prompts[0], prompts[-1], self.cfg)

    def _tensors(self, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        if self.family_name == "flux":
            return {
                "context": torch.randn(batch, self.text, self.config["joint_attention_dim"], generator=generator),
                "pooled": torch.randn(batch, self.config["pooled_projection_dim"], generator=generator),
            }
        tensors = {"context": torch.randn(batch, self.text, self.config["caption_channels"], generator=generator)}
        if self.config["use_additional_conditions"]:
            tensors |= {"resolution": torch.full((batch, 2), 8.0 * self.side), "aspect_ratio": torch.ones(batch, 1)}
        return tensors

    def load(self, folder: Path, device: str = "cpu") -> torch.nn.Module:
        """diffusers' own model, loaded by diffusers."""
        loader = self.family.transformer_class().from_pretrained
        model = loader(folder, torch_dtype=TORCH_DTYPES[self.dtype], low_cpu_mem_usage=False)
        return model.to(device).eval().requires_grad_(False)

    def predict(self, model: torch.nn.Module) -> Predict:
        """diffusers' own forward on a latent, in the model's dtype, wherever the model is. Latents stay fp32."""
        parameter = next(model.parameters())
        call = {"flux": self._flux, "pixart": self._pixart}[self.family_name]

        @torch.inference_mode()
        def predict(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            place: Callable[[torch.Tensor], torch.Tensor] = lambda value: value.to(parameter.device, parameter.dtype)  # noqa: E731
            out = call(model, place(x), place(timestep), {name: place(value) for name, value in tensors.items()})
            return out.to(x)

        return predict

    def _flux(self, model, x, timestep, tensors) -> torch.Tensor:
        patching = self.family.patching
        rows, columns = patching.grid(tuple(x.shape))
        down, across = (torch.arange(count, device=x.device).float() for count in (rows, columns))
        places = torch.cartesian_prod(torch.zeros(1, device=x.device), down, across)
        out = model(
            hidden_states=patching.pack(x),
            encoder_hidden_states=tensors["context"],
            pooled_projections=tensors["pooled"],
            timestep=timestep,
            img_ids=places,
            txt_ids=torch.zeros(self.text, 3, device=x.device),
            return_dict=False,
        )[0]
        return patching.unpack(out, tuple(x.shape))

    def _pixart(self, model, x, timestep, tensors) -> torch.Tensor:
        out = model(
            hidden_states=x,
            encoder_hidden_states=tensors["context"],
            timestep=timestep,
            added_cond_kwargs={name: tensors.get(name) for name in ("resolution", "aspect_ratio")},
            return_dict=False,
        )[0]
        return out.chunk(2, dim=1)[0]


def _flux_config(doubles: int, singles: int, heads: int, head: int, joint: int, pooled: int, axes: tuple) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": doubles,
        "num_single_layers": singles,
        "attention_head_dim": head,
        "num_attention_heads": heads,
        "joint_attention_dim": joint,
        "pooled_projection_dim": pooled,
        "guidance_embeds": False,
        "axes_dims_rope": axes,
    }


def _pixart_config(layers: int, heads: int, caption: int, sample: int, sizes: bool) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": layers,
        "cross_attention_dim": heads * 72,
        "attention_bias": True,
        "sample_size": sample,
        "patch_size": 2,
        "use_additional_conditions": sizes,
        "caption_channels": caption,
    }


FLUX_LIKE = Subject("Flux-like", "flux", _flux_config(2, 4, 8, 64, 64, 64, (8, 28, 28)), side=64, text=32)
PIXART_LIKE = Subject("PixArt-like", "pixart", _pixart_config(4, 8, 64, 128, False), side=48, text=32, cfg=4.5)
DEEPEST_FLUX_LIKE = Subject("Flux-like", "flux", _flux_config(4, 8, 8, 64, 64, 64, (8, 28, 28)), side=64, text=32)
"""Twelve blocks: enough for stages that are cut unevenly, and for a loading that takes seconds."""

DEEPER_FLUX_LIKE = Subject("Flux-like", "flux", _flux_config(2, 6, 8, 64, 64, 64, (8, 28, 28)), side=64, text=32)
"""Enough blocks for eight stages."""

PIXART_XL = Subject(
    "PixArt-XL-2-1024-MS shapes", "pixart", _pixart_config(28, 16, 4096, 128, True), side=256, text=120, cfg=4.5
)
FLUX_SCHNELL = Subject(
    "Flux-schnell shapes", "flux", _flux_config(19, 38, 24, 128, 4096, 768, (16, 56, 56)), side=128, text=256, steps=4
)
