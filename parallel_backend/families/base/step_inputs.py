"""Inputs of a rank's model in one micro-step, and the conditioning tensors that any family may have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder

Config = dict[str, Any]
"""Constructor arguments of the family's class."""

Shapes = Mapping[str, tuple[int, ...]]
"""Checkpoint key (original layout, no prefix) -> shape."""

TEXT_ENDS = "text_ends"
"""Conditioning tensor [B, T] int64, the same for all entries: how many of the text's first tokens each text token sees, in
layers over CAUSAL_TEXT (base/blocks.py). A family that has such layers names it in `Inputs.vector_tensors`."""


@dataclass(frozen=True)
class StepInputs:
    """One micro-step, for `Forward.arguments`. All tensors are on the rank's device and have the rank's b batch entries."""

    x: torch.Tensor | None
    """Tokens [b, n, C]: the rank's shard of the band's packed latent, in the order of `token_order`. None on ranks without a
    prologue. With `Forward.whole_latent`: a latent [b, C, (T,) H, W] without reference tokens, on every rank, zero outside
    of the shard, and zero everywhere without a prologue."""

    timestep: torch.Tensor
    """The sampler's timestep, float32: [b], or [b, T] with a time for each latent frame, or [b, N, 1] with a time for each
    token of the whole video."""

    tensors: dict[str, torch.Tensor]
    """Conditioning tensors."""

    grid: tuple[int, ...]
    """The picture's tokens along its axes."""

    token_order: TokenOrder
    """The order of the call's image tokens."""

    image: Span
    """The rank's image tokens, in that order."""

    text: Span
    """The rank's tokens of the text stream, in which those of a companion latent precede the words."""

    text_tokens: int = 0
    """Tokens of the whole text stream."""

    dtype: torch.dtype = torch.float32
    """The rank's compute dtype."""

    kept: dict[Any, Any] = field(default_factory=dict)
    """Cache shared by all micro-steps with the same tokens and the same conditioning."""

    x_companion: torch.Tensor | None = None
    """Tokens [b, a, C] of `companion`, with channels padded to those of `x`. None on ranks without a prologue."""

    companion_tokens: int = 0
    """Tokens of the whole companion latent (patching.Companion)."""

    def of_tokens(self, name: str, make: Callable[[Span], torch.Tensor]) -> torch.Tensor:
        """`make(image)`, a tensor in host memory, copied to the rank's device and cached: see `kept_on`."""
        return kept_on(self.timestep.device, self.kept, name, lambda: make(self.image))

    def places_in_class(self, image: Span) -> torch.Tensor:
        """[n] int64: numbers of these tokens by frames, rows, columns."""
        return self.token_order.places_in_class(self.grid, image)

    def positions(self, top: int = 0, left: int = 0, front: int = 0) -> torch.Tensor:
        """(frame, row, column) of the rank's image tokens, [n, 3] float32, from (`front`, `top`, `left`) on."""
        if (top, left, front) not in self.kept:
            self.kept[top, left, front] = self._positions(top, left, front)
        return self.kept[top, left, front]

    def _positions(self, top: int, left: int, front: int) -> torch.Tensor:
        device = self.timestep.device
        picture = to_device(torch.cartesian_prod(*(torch.arange(float(side)) for side in (1, *self.grid)[-3:])), device)
        picture = picture + to_device(torch.tensor((front, top, left), dtype=torch.float32), device)
        return picture[to_device(self.places_in_class(self.image), device)]

    def text_tensor(self, name: str, width: int) -> torch.Tensor:
        """Token tensor `name` [b, T, width], or zeros on stages that do not get it, for forwards that read its shape."""
        text = self.tensors.get(name)
        return self.zeros(self.text_tokens, width) if text is None else text

    def image_tensor(self) -> torch.Tensor:
        """`x`, or zeros [b, n, 1] on stages without a prologue, for forwards that look at its shape and dtype."""
        return self.zeros(len(self.image)) if self.x is None else self.x

    def zeros(self, tokens: int, width: int = 1) -> torch.Tensor:
        """[b, tokens, width] in the compute dtype."""
        return self.timestep.new_zeros(len(self.timestep), tokens, width, dtype=self.dtype)

    @property
    def text_numbers(self) -> torch.Tensor:
        """[t] float32: numbers of the rank's text tokens in the whole text."""
        return torch.arange(self.text.start, self.text.stop, dtype=torch.float32, device=self.timestep.device)


def kept_on(device: torch.device, kept: dict[Any, Any], name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`make()`, a tensor in host memory, copied to the device once and cached in `kept` as `name`.

    An index made on the device, such as the places where a comparison holds, would make the host wait for its size.
    """
    if name not in kept:
        kept[name] = to_device(make(), device)
    return kept[name]


@dataclass(frozen=True)
class Rows:
    """The rank's tokens of a micro-step within whole tensors, to which block slots cut arguments down (block_slots.py)."""

    image: slice | torch.Tensor
    """Index of the rank's image tokens in the class's order."""

    image_tokens: int
    """Tokens of the whole image."""

    def of_image(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """`value`, with all image tokens along `dim` -> the rank's."""
        return value[(slice(None),) * dim + (self.image,)]


ArgumentCut = Callable[[Any, Rows], Any]
"""(argument of a block for the whole sequence, rows) -> the argument for the rank's tokens."""
