"""What is to be run, in plain numbers: the model's blocks and their sizes, the picture's tokens, the steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.placement.balance import block_bytes
from parallel_backend.client.placement.memory_model import ends_bytes
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import device_kind
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.validate import check_model
from parallel_backend.families.base.step_inputs import Shapes


@dataclass(frozen=True)
class Workload:
    """A model and a sampling run of it.

    `shape`: of the latent; `entries`: of the batch at a model call, pictures x prompts; `prompt`: tokens of each.
    `blocks`: for each block, all lists counted through, the "<list>.<index>" of the first of its kind (same list, same
    parameters), which is rehearsed in its place. `block_bytes`: of each block's weights; `first_bytes`, `last_bytes`,
    `shared_bytes`: of those around the blocks that the first, the last, or every stage has. `text`, `image`: tokens; `rows`:
    of image tokens along the axis that bands cut. `token_bytes`: one token's hidden state. `carried`: by number of blocks
    before a boundary of stages, how many blocks' outputs cross it beside the hidden states.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    entries: int
    steps: int
    prompt: int
    blocks: tuple[str, ...]
    block_bytes: tuple[int, ...]
    first_bytes: int
    last_bytes: int
    shared_bytes: int
    text: int
    image: int
    rows: int
    token_bytes: int
    carried: tuple[int, ...]
    check: Callable[[Degrees], None]
    warm_up: int = 1

    @property
    def kept(self) -> tuple[str, ...]:
        """One block of each kind."""
        return tuple(dict.fromkeys(self.blocks))

    @property
    def ends(self) -> tuple[int, int, int]:
        """Bytes around the blocks: see memory_model.ends_bytes."""
        return self.first_bytes, self.last_bytes, self.shared_bytes

    @property
    def weight_bytes(self) -> int:
        return sum(self.block_bytes) + sum(self.ends)

    @property
    def warm_up_steps(self) -> int:
        return min(self.warm_up, self.steps)


def subject_of(
    checkpoint: Checkpoint, dtype: str, device: str, shape: tuple[int, ...], entries: int, steps: int, prompt: int
) -> Workload:
    """`shape`: [B, C, (T,) H, W] of the latent. ValueError if it has no frames, where the model is one for video."""
    family, config = checkpoint.family, checkpoint.config
    grid = family.patching.grid(shape)
    if len(shape) != 2 + len(grid):
        raise ValueError(
            f"latent_image: the latent has {len(shape)} axes, this model needs {2 + len(grid)}. Use the Empty Latent node "
            "made for this model."
        )
    lists = [name for name, count in family.blocks.counts(config).items() for _ in range(count)]
    names = [f"{name}.{index}" for name, count in family.blocks.counts(config).items() for index in range(count)]
    kinds = _kinds(names, {target: checkpoint.shape(target) for target in checkpoint.key_map})
    example = family.inputs.example(config, prompt)
    words = next((example[name].shape[1] for name in family.inputs.token_tensors if name in example), None)
    text = family.image_padding(grid) + (0 if words is None else family.inputs.padded(words))

    def check(degrees: Degrees) -> None:
        check_model(
            degrees,
            heads=family.sizes.heads(config),
            blocks=len(lists),
            key_heads=family.sizes.key_heads(config),
            unsupported=family.unsupported,
        )

    return Workload(
        checkpoint.path.name,
        family.name,
        dtype,
        (shape[0], family.sizes.latent_channels(config), *shape[2:]),
        entries,
        steps,
        prompt,
        tuple(kinds[name] for name in names),
        tuple(block_bytes(checkpoint, lists, dtype, 1)),
        *ends_bytes(checkpoint, dtype),
        text,
        math.prod(grid),
        grid[family.patching.band_dim],
        family.sizes.hidden(config) * compute_dtype(dtype, torch.device(device_kind(device))).itemsize,
        tuple(len(family.blocks.carried(config, boundary)) for boundary in range(len(lists) + 1)),
        check,
    )


def _kinds(names: list[str], shapes: Shapes) -> dict[str, str]:
    """Block -> the first block of the same list whose parameters have the same names and shapes."""
    parameters: dict[str, list[tuple[str, tuple[int, ...]]]] = {name: [] for name in names}
    for target, shape in shapes.items():
        top, _, rest = target.partition(".")
        index, _, parameter = rest.partition(".")
        if (block := f"{top}.{index}") in parameters:
            parameters[block].append((parameter, shape))
    first: dict[tuple, str] = {}
    return {name: first.setdefault((name.partition(".")[0], *sorted(found)), name) for name, found in parameters.items()}
