"""Models with the shapes of published ones: their files, of which only the header is written, and the inputs of a call."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_checkpoint, to_original
from parallel_backend.families import FAMILIES, Family
from parallel_backend.families.base.patching import Latents
from parallel_backend.families.own_class.building import build
from parallel_backend.families.own_class.family import own_class_family
from parallel_backend.quickstart.model import mini_wan
from parallel_backend.rank.stage.meta_model import meta_model
from testing import mini
from testing.files import write_header


@dataclass(frozen=True, eq=False)
class RealModel:
    """A model and what is made with it, in bf16.

    `latents`: of one entry, [C, (T,) H, W], and the companion's. `text`: [tokens, width] of a prompt. `entries`: of a call,
    two with guidance. `call`: further inputs of ComfyUI's model call. `depths`: arguments of the class that count blocks.
    """

    family_name: str
    config: dict[str, Any]
    made: str
    latents: tuple[tuple[int, ...], ...]
    text: tuple[int, int]
    entries: int = 1
    call: dict[str, Any] = field(default_factory=dict)
    timestep: float = 1.0
    depths: tuple[str, ...] = ("num_layers",)

    @property
    def family(self) -> Family:
        return FAMILIES[self.family_name]

    def with_depths(self, *depths: int) -> "RealModel":
        """The same with so many blocks of each list."""
        return replace(self, config=self.config | dict(zip(self.depths, depths, strict=True)))

    def save(self, path: Path) -> Path:
        return save_header(path, self.config, self.family_name)

    def opened(self, path: Path) -> Checkpoint:
        return open_checkpoint(path)

    def noise(self) -> torch.Tensor | Latents:
        """The latents of a call."""
        parts = tuple(torch.zeros(self.entries, *shape) for shape in self.latents)
        return parts if len(parts) > 1 else parts[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Conditioning tensors of a call."""
        grid = self.family.patching.grid((self.entries, *self.latents[0]))
        return self.family.inputs.conditioning(self.config, {**self.call_tensors(), **self.call, "grid": grid})

    def call_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of ComfyUI's model call."""
        tensors = {"context": torch.zeros(self.entries, *self.text)}
        if pooled := self.config.get("pooled_projection_dim"):
            tensors |= {"y": torch.zeros(self.entries, pooled), "guidance": torch.full((self.entries,), 3.5)}
        return tensors


@dataclass(frozen=True, eq=False)
class MiniModel(RealModel):
    """One of the mini class, which ranks run by its class."""

    @property
    def family(self) -> Family:
        return own_class_family(mini.proven(self.config))

    def save(self, path: Path) -> Path:
        return mini.save_header(path, self.config)

    def opened(self, path: Path) -> Checkpoint:
        _, height, width = self.latents[0]
        return mini.opened(path, height=height, width=width, text=self.text[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        _, height, width = self.latents[0]
        return mini.conditioning(self.config, self.entries, height, width, self.text[0])


@dataclass(frozen=True, eq=False)
class WanShaped(RealModel):
    """A file of ComfyUI's Wan, whose tensors mini_wan.py names. Only ComfyUI's class runs it."""

    def save(self, path: Path) -> Path:
        state = build(mini_wan(**self.config)).state_dict()
        return write_header(path, {name: tuple(value.shape) for name, value in state.items()})


QWEN_IMAGE_21 = {
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 32,
    "attention_head_dim": 128,
    "num_attention_heads": 32,
    "context_in_dim": 4096,
    "mlp_ratio": 3,
    "axes_dims_rope": (16, 56, 56),
    "fused_mlp": True,
}


def _qwen_image_21(references: int) -> RealModel:
    """Made with so many given pictures of the new one's size."""
    given = {
        "ref_latents": [torch.zeros(1, 64, 64, 64)] * references,
        "image_slots": [20 * each for each in range(references)],
    }
    made = f"picture, 1024 x 1024, {references} given pictures"
    return RealModel("qwen-image-2.1", QWEN_IMAGE_21, made, ((64, 64, 64),), (200, 4096), call=given if references else {})


BY_CLASS = {
    "flux-dev": MiniModel(
        "",
        mini.FLUX_DEV,
        "picture, 1024 x 1024",
        ((16, 128, 128),),
        (512, 4096),
        depths=("double_blocks", "single_blocks"),
    ),
    "wan-2.2-14b": WanShaped(
        "",
        {"context_width": 4096, "width": 5120, "hidden": 13824, "layers": 40},
        "81 frames, 1280 x 720, two prompts; one expert",
        ((16, 21, 90, 160),),
        (512, 4096),
        entries=2,
        timestep=1000.0,
        depths=("layers",),
    ),
}
"""Of no family: ranks run the mini class, whose arithmetic is plain, or ComfyUI's."""


REAL_MODELS = {
    "qwen-image-2.1": _qwen_image_21(0),
    "qwen-image-2.1-one-reference": _qwen_image_21(1),
    "qwen-image-2.1-three-references": _qwen_image_21(3),
}
"""By name, of families: one whose prompt, with its given pictures, is computed once a run."""


def save_header(path: Path, config: dict[str, Any], family: str) -> Path:
    """A bf16 file of this model, in its original layout."""
    with torch.device("meta"):
        state = meta_model(FAMILIES[family], config).state_dict()
        shapes = {name: tuple(value.shape) for name, value in to_original(FAMILIES[family], config, state).items()}
    return write_header(path, shapes | FAMILIES[family].file.computed(config))
