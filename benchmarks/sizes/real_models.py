"""Models with the shapes of published ones: their files, of which only the header is written, and the inputs of a call."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.built.built_class import BuiltClass, built_class
from parallel_backend.quickstart.model import mini_flux, mini_wan
from testing import mini
from testing.files import write_header


@dataclass(frozen=True, eq=False)
class RealModel:
    """A model by a bundled class, and what is made with it, in bf16.

    `config`: arguments of the class; `depths`: those that count blocks. `latent`: of one entry, [C, (T,) H, W]. `text`:
    [tokens, width] of a prompt. `entries`: of a call, two with guidance.
    """

    config: dict[str, Any]
    made: str
    latent: tuple[int, ...]
    text: tuple[int, int]
    depths: tuple[str, ...]
    entries: int = 1
    timestep: float = 1.0

    @property
    def own(self) -> OwnClass:
        return mini_flux(**self.config) if "double_blocks" in self.config else mini_wan(**self.config)

    def with_depths(self, *depths: int) -> Self:
        """The same with so many blocks of each list."""
        return replace(self, config=self.config | dict(zip(self.depths, depths, strict=True)))

    def save(self, path: Path) -> Path:
        """A file, of which only the header is written."""
        return write_header(path, {name: tuple(value.shape) for name, value in build(self.own).state_dict().items()})

    def noise(self) -> torch.Tensor:
        """The latent of a call."""
        return torch.zeros(self.entries, *self.latent)

    def call_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of ComfyUI's model call."""
        tensors = {"context": torch.zeros(self.entries, *self.text)}
        if pooled := self.config.get("pooled_width"):
            tensors |= {"y": torch.zeros(self.entries, pooled), "guidance": torch.full((self.entries,), 3.5)}
        return tensors


@dataclass(frozen=True, eq=False)
class MiniModel(RealModel):
    """One that ranks run by the mini class. Others are run by ComfyUI's alone."""

    @property
    def built(self) -> BuiltClass:
        return built_class(mini.proven(self.config))

    def opened(self, path: Path) -> Checkpoint:
        _, height, width = self.latent
        return mini.opened(path, height=height, width=width, text=self.text[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Conditioning tensors of a call."""
        _, height, width = self.latent
        return mini.conditioning(self.config, self.entries, height, width, self.text[0])


FLUX_DEV = MiniModel(
    mini.FLUX_DEV, "picture, 1024 x 1024", (16, 128, 128), (512, 4096), depths=("double_blocks", "single_blocks")
)
REAL_MODELS: dict[str, RealModel] = {
    "flux-dev": FLUX_DEV,
    "wan-2.2-14b": RealModel(
        {"context_width": 4096, "width": 5120, "hidden": 13824, "layers": 40},
        "81 frames, 1280 x 720, two prompts; one expert",
        (16, 21, 90, 160),
        (512, 4096),
        depths=("layers",),
        entries=2,
        timestep=1000.0,
    ),
}
