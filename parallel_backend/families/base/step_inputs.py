"""What a rank calls a model with in one micro-step, and the conditioning tensors that any family may have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder

Config = dict[str, Any]
"""Constructor arguments of the family's diffusers class, and the settings that FileLayout adds to them."""

Shapes = Mapping[str, tuple[int, ...]]
"""Checkpoint key (original layout, no prefix) -> shape."""

TEXT_MASK = "text_mask"
"""Conditioning tensor [B, T] bool: text tokens that attention may see. The model's own code, which knows one rank's tokens
only, never gets it: parallel_attention.py applies it."""

GUIDANCE = "guidance"
"""Conditioning tensor [B]: embedded guidance, float32 on the ranks too."""

REFERENCES, REFERENCE_POSITIONS = "references", "reference_positions"
"""Conditioning tensors of reference pictures: their tokens [B, R, C], packed like the latent's, and the positions of those
[B, R, 3]: index, row, column."""

REFERENCES_AT_ZERO = "references_at_zero"
"""Conditioning tensor [B] bool: reference tokens are modulated for time 0, not for the sampler's. Absent: they are not.
A family that can have it names it in `Inputs.vector_tensors`."""

ROPE = "rope"
"""Conditioning tensor [B, 2, 3] float32, alike for all entries: what the picture's positions (index or frame, row, column)
are multiplied by, and what is then added. Absent: positions are the usual ones."""

ROPE_FREQUENCY = "rope_frequency"
"""Conditioning tensor [B, 2] float32, alike for all entries: number of a rotary frequency of the frames' axis, and its
radians for each frame. Absent: frequencies are the usual ones."""

EVERYWHERE = (TEXT_MASK, REFERENCE_POSITIONS, ROPE, ROPE_FREQUENCY)
"""Conditioning tensors that every stage gets, of whatever family."""


@dataclass(frozen=True)
class StepInputs:
    """One micro-step, for `Forward.arguments`. All tensors are on the rank's device, with its entries only."""

    x: torch.Tensor | None
    """Tokens [b, n, C]: the rank's shard of the band's packed latent, reference tokens in their places. None where the rank
    has no prologue. With `Forward.whole_latent`: a latent [b, C, (T,) H, W] on every rank, zero outside of the shard, all
    zero without a prologue, without reference tokens."""

    timestep: torch.Tensor
    """The sampler's, float32: [b], or [b, T] with a time for each latent frame, or [b, N, 1] with one for each token of the
    whole video."""

    tensors: dict[str, torch.Tensor]
    """Conditioning tensors."""

    grid: tuple[int, ...]
    """The picture's tokens along its axes."""

    token_order: TokenOrder
    """The order of the image tokens."""

    image: Span
    """The rank's image tokens, in that order."""

    text: Span
    """The rank's tokens of the text stream: those of a companion latent come first, then the words."""

    text_tokens: int = 0
    """Tokens of the whole text stream."""

    dtype: torch.dtype = torch.float32
    """The rank's compute dtype."""

    kept: dict[Any, Any] = field(default_factory=dict)
    """Values that all micro-steps for the same tokens of the same conditioning share."""

    x_companion: torch.Tensor | None = None
    """Tokens [b, a, C] of `companion`, channels filled up to those of `x`. None where the rank has no prologue."""

    companion_tokens: int = 0
    """Tokens of the whole companion latent (patching.Companion)."""

    host_timestep: Callable[[], torch.Tensor] | None = None
    """Gives `timestep` as it came, in the host's memory. None: it is on the device alone."""

    @property
    def on_host(self) -> torch.Tensor:
        """`timestep` where the host can look at it without waiting for the device.

        A micro-step that does is no CUDA graph, which would repeat for ever what was worked out of this one.
        """
        return self.timestep.cpu() if self.host_timestep is None else self.host_timestep()

    @property
    def companion(self) -> Span:
        """The rank's tokens of the companion latent."""
        return self.text.before(self.companion_tokens)

    @property
    def text_span(self) -> Span:
        """The rank's text tokens, counted without those of the companion latent."""
        return self.text.after(self.companion_tokens)

    def of_tokens(self, name: str, make: Callable[[Span], torch.Tensor]) -> torch.Tensor:
        """`make(image)`, made on the host, on the rank's device: see `kept_on`."""
        return kept_on(self.timestep.device, self.kept, name, lambda: make(self.image))

    def places_in_class(self, image: Span) -> torch.Tensor:
        """[n] int64: numbers of these tokens by frames, rows, columns; reference tokens come behind those."""
        return self.token_order.places_in_class(self.grid, image)

    def positions(self, top: int = 0, left: int = 0, front: int = 0) -> torch.Tensor:
        """(frame, row, column) of the rank's image tokens, [n, 3] float32.

        Rows count from `top`, columns from `left`, frames from `front`, by ROPE. Reference tokens have their
        REFERENCE_POSITIONS.
        """
        if (top, left, front) not in self.kept:
            self.kept[top, left, front] = self._positions(top, left, front)
        return self.kept[top, left, front]

    @property
    def times(self) -> torch.Tensor:
        """The sampler's timestep [b], followed by as many zeros where reference tokens are at time 0."""
        zeros = self.timestep * 0
        return torch.cat((self.timestep, zeros)) if REFERENCES_AT_ZERO in self.tensors else self.timestep

    def at_zero(self) -> torch.Tensor | None:
        """[n] bool: which of the rank's image tokens are at time 0. None: none can be."""
        if REFERENCES_AT_ZERO not in self.tensors:
            return None
        return self.of_tokens("at zero", lambda span: self.token_order.places(span) >= self.token_order.image)

    def _positions(self, top: int, left: int, front: int) -> torch.Tensor:
        device = self.timestep.device
        references, rope = self.tensors.get(REFERENCE_POSITIONS), self.tensors.get(ROPE)
        own = to_device(torch.cartesian_prod(*(torch.arange(float(side)) for side in (1, *self.grid)[-3:])), device)
        own = own if rope is None else own * rope[0, 0] + rope[0, 1]
        own = own + to_device(torch.tensor((front, top, left), dtype=torch.float32), device)
        whole = own if references is None else torch.cat((own, references[0].float()))
        return whole[to_device(self.places_in_class(self.image), device)]

    def text_tensor(self, name: str, width: int) -> torch.Tensor:
        """Token tensor `name` [b, T, width]. Zeros on stages that do not get it, which only look at its shape."""
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
    """`make()` on the device, made once in `kept`: a tensor of the host, such as an index.

    On the device it would come out of a comparison, for whose size the host waits.
    """
    if name not in kept:
        kept[name] = to_device(make(), device)
    return kept[name]


@dataclass(frozen=True)
class Rows:
    """The tokens of whole tensors that a micro-step is about. Block slots cut arguments down to them (block_slots.py)."""

    image: slice | torch.Tensor
    """Index of the band's image tokens, in the model's own order. Reference tokens come last there."""

    image_tokens: int
    """Tokens of the whole image."""

    text: Span
    """The rank's text tokens. A list with no text but the image's padding has the first of them."""

    text_first: bool
    """As `Blocks.text_first`."""

    def of_image(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """`value`, which has the whole image's tokens along `dim`, cut down."""
        return value[(slice(None),) * dim + (self.image,)]

    def of_joint(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """`value`, which has the whole joint sequence along `dim`, cut down."""
        text_tokens = value.shape[dim] - self.image_tokens
        text_length, image = (text_tokens, self.image_tokens) if self.text_first else (self.image_tokens, text_tokens)
        first, second = value.split((text_length, image), dim)
        text, image = (first, second) if self.text_first else (second, first)
        own = self.text.before(text_tokens)
        parts = (text.narrow(dim, own.start, len(own)), self.of_image(image, dim))
        return torch.cat(parts if self.text_first else parts[::-1], dim)


ArgumentCut = Callable[[Any, Rows], Any]
"""(argument of a block, made for the whole sequence; rows) -> the same for the rank's tokens."""


def image_tables(dim: int) -> ArgumentCut:
    """Cut of an argument that is several tables, each with the whole image's tokens along `dim`."""
    return lambda tables, rows: tuple(rows.of_image(table, dim) for table in tables)
