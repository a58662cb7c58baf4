"""The models of the state machine, what is added to their weights, and the calls that are made of them."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.sampling import Prompt
from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from testing import mini

CONFIG = mini.CONFIG | {"double_blocks": 2, "single_blocks": 4}
TIMES = (0.9, 0.6, 0.3)
SIGMAS = torch.tensor([0.9, 0.6, 0.3, 0.0])
BANDS = 2
EVERY = {"lora": 4, "full": 9, "merge": 7}
"""Of which weights, in the file's order, one is added to."""


@dataclass(frozen=True)
class Added:
    """What is added to a model's weights. `kind`: of EVERY; empty: nothing. `strength`: of every other delta, a group."""

    kind: str = ""
    seed: int = 0
    scale: float = 1.0
    strength: float = 1.0

    @property
    def name(self) -> tuple | None:
        """Equal for equal deltas. A strength can change by itself."""
        return (self.kind, self.seed, self.scale) if self.kind else None

    @property
    def strengths(self) -> tuple[float, ...]:
        return (self.strength,) if self.kind == "lora" else ()


NOTHING = Added()
ADDITIONS = (
    NOTHING,
    Added("lora"),
    Added("lora", strength=0.5),
    Added("lora", scale=0.5),
    Added("lora", seed=1),
    Added("full"),
    Added("merge"),
    Added("merge", seed=1),
)


@dataclass(frozen=True)
class Given:
    """A conditioning. `skips`: a block is skipped."""

    prompt: int = 0
    skips: bool = False


@dataclass(frozen=True)
class Subject:
    """A model of the mini class, of `path` at `degrees`."""

    name: str
    path: Path
    degrees: Degrees
    _factors: dict[tuple[str, int], list[Delta]] = field(default_factory=dict, compare=False, repr=False)

    def opened(self) -> Checkpoint:
        return mini.opened(self.path)

    def setup(self, devices: tuple[str, ...]) -> Setup:
        return mini.setup(self.path, "fp32", devices, self.degrees, "sdpa", "even")

    def tensors(self, given: Given) -> dict[str, torch.Tensor]:
        """The conditioning's tensors."""
        return mini.inputs(CONFIG, batch=1, height=8, width=8, seed=given.prompt)[2]

    def latent(self) -> torch.Tensor:
        return torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(7))

    def call(self, given: Given, time: float) -> ModelCall:
        return ModelCall(self.latent(), torch.tensor([time]), self.tensors(given), changes=self.changes(given))

    def changes(self, given: Given) -> BlockChanges:
        return BlockChanges(skipped=("double_blocks.1",)) if given.skips else UNCHANGED

    def prompt(self, given: Given) -> Prompt:
        tensors = self.tensors(given)
        return Prompt(tensors, tensors, 1.0)

    def deltas(self, added: Added) -> list[Delta]:
        """The tensors of equal `kind` and `seed` are the same ones in memory, as those of a LoRA that ComfyUI holds."""
        key = added.kind, added.seed
        if key not in self._factors:
            self._factors[key] = list(self._made(*key)) if added.kind else []
        return [
            Delta(each.key, each.up, each.down, each.scale * added.scale, group=each.group, instead=each.instead)
            for each in self._factors[key]
        ]

    def _made(self, kind: str, seed: int):
        generator = torch.Generator().manual_seed(seed)
        shapes = [(key, shape) for key, shape in self._shapes.items() if kind != "lora" or len(shape) == 2]
        for number, (key, shape) in enumerate(shapes[seed :: EVERY[kind]]):
            if kind == "lora":
                up, down = (torch.randn(size, generator=generator) for size in ((shape[0], 2), (2, shape[1])))
                yield Delta(key, up, down, 0.05, group=number % 2)
            else:
                yield Delta(key, 0.1 * torch.randn(shape, generator=generator), instead=kind == "merge")

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.opened().original_shapes


def make_subjects(folder: Path) -> tuple[Subject, ...]:
    """Two models of equal sizes at different degrees."""
    one, other = (mini.save(mini.random_model(CONFIG, seed=seed), folder / f"mini {seed}.safetensors") for seed in (0, 5))
    return Subject("in stages", one, Degrees(pipe=2)), Subject("under Ulysses", other, Degrees(ulysses=2))
