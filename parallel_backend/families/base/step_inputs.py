"""What a family's `arguments` get for one micro-step, and the names of conditioning tensors that any family may have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder

Config = dict[str, Any]
"""Constructor arguments of the family's diffusers class."""


Shapes = Mapping[str, tuple[int, ...]]
"""Checkpoint key (original layout, no prefix) -> shape."""


TEXT_MASK = "text_mask"
"""Name of a conditioning tensor [B, T] bool that any family may have: which text tokens attention may see. It never
reaches the model's own code, which knows one rank's tokens only; the seam applies it (parallel_attention.py)."""


GUIDANCE = "guidance"
"""Name of a conditioning tensor [B] that any family may have: embedded guidance, which ranks keep in float32."""


REFERENCES, REFERENCE_POSITIONS = "references", "reference_positions"
"""Names of conditioning tensors that any family may have: tokens [B, R, C] of reference pictures, packed like the latent's,
and their positions [B, R, 3]: index, row, column."""


@dataclass(frozen=True)
class StepInputs:
    """What a family's `arguments` may use to call the model's own forward for one micro-step, all on the rank's device.

    `x`: [b, n, C] the rank's shard of the band's packed latent, reference tokens in their places, None where the rank has
    no prologue. In families of `whole_latent`: the latent [b, C, (T,) H, W] on every rank, zero outside of that shard (in
    all where there is no prologue), without reference tokens.
    `timestep`: [b] float32, or [b, T] or [b, N, 1] where each latent frame or each token of the whole video has its own, as
    the sampler gave it. `tensors`: the conditioning's, entries of this micro-step only. `grid`: the picture's tokens along
    its axes; `stream`: their order. `image`, `text`: the rank's tokens in that order and in the text. `text_tokens`: of the
    whole text. `kept`: shared by all micro-steps for the same tokens of the same conditioning.
    """

    x: torch.Tensor | None
    timestep: torch.Tensor
    tensors: dict[str, torch.Tensor]
    grid: tuple[int, ...]
    stream: TokenOrder
    image: Span
    text: Span
    text_tokens: int = 0
    dtype: torch.dtype = torch.float32  # that the rank computes in
    kept: dict[Any, torch.Tensor] = field(default_factory=dict)

    def positions(self, top: int = 0, left: int = 0) -> torch.Tensor:
        """[n, 3] float32 of the rank's image tokens: (frame, row, column) from (0, `top`, `left`) on, for bands along rows;
        REFERENCE_POSITIONS' own.
        """
        if (top, left) not in self.kept:  # made on the host, which CUDA devices would have to be waited for
            self.kept[top, left] = self._positions(top, left)
        return self.kept[top, left]

    def _positions(self, top: int, left: int) -> torch.Tensor:
        places, (frames, rows, columns) = self.stream.places(self.image), (1, *self.grid)[-3:]
        sides = torch.arange(rows) + float(top), torch.arange(float(frames)), torch.arange(columns) + float(left)
        own = torch.cartesian_prod(*sides)[:, (1, 0, 2)]
        device = self.timestep.device
        references = self.tensors.get(REFERENCE_POSITIONS)
        whole = own.to(device) if references is None else torch.cat((own.to(device), references[0].float()))
        return whole[places.to(device)]

    def text_tensor(self, name: str, width: int) -> torch.Tensor:
        """Token tensor `name` [b, T, width]; on stages that are not sent it, zeros, of which only the shape is used."""
        given = self.tensors.get(name)
        if given is not None:
            return given
        return self.timestep.new_zeros(len(self.timestep), self.text_tokens, width, dtype=self.dtype)


@dataclass(frozen=True)
class Rows:
    """Which tokens of whole tensors the micro-step is about: a stage's slots cut arguments down to them (block_slots.py).

    `image`: index of the band's image tokens in the model's own order, of `image_tokens` (reference tokens come last
    there); `text`: the rank's text tokens, of which a list that has the image's padding alone has the first.
    """

    image: slice | torch.Tensor
    image_tokens: int
    text: Span
    text_first: bool

    def of_image(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """`value` has the whole image's tokens along `dim`."""
        return value[(slice(None),) * dim + (self.image,)]

    def of_joint(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """`value` has the whole sequence along `dim`, text and image in the family's order."""
        text_tokens = value.shape[dim] - self.image_tokens
        words, image = (text_tokens, self.image_tokens) if self.text_first else (self.image_tokens, text_tokens)
        first, second = value.split((words, image), dim)
        text, image = (first, second) if self.text_first else (second, first)
        own = self.text.before(text_tokens)
        parts = (text.narrow(dim, own.start, len(own)), self.of_image(image, dim))
        return torch.cat(parts if self.text_first else parts[::-1], dim)


ArgumentCut = Callable[[Any, Rows], Any]
"""(argument of a block, made for the whole sequence; rows) -> the same for the rank's tokens."""
