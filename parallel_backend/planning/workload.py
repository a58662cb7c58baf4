"""A workload: a model and a sampling run of it, as plain numbers."""

import math
from dataclasses import dataclass, replace
from statistics import fmean

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.spans import Span, split_carrying
from parallel_backend.own_class.built.built_class import StreamKeys
from parallel_backend.placement.expected_request import expected_request
from parallel_backend.placement.memory_model import KV_COPIES, Request
from parallel_backend.placement.model_sizes import ModelSizes, model_sizes

from .trials import Trials


@dataclass(frozen=True)
class Workload:
    name: str
    """File name of the model."""
    kind: str
    """Name of its class."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the latent."""
    entries: int
    """Batch entries of a model call: images times prompts."""
    steps: int
    prompt: int
    """Tokens of each prompt."""
    blocks: tuple[str, ...]
    """Kind of each block of all lists: "<list>.<index>" of the first block of that list with the same attention."""
    sizes: ModelSizes
    grid: tuple[int, ...]
    """Number of image tokens along each axis."""
    text: int
    """Number of text tokens that run through the blocks."""
    band_dim: int = -2
    """The axis of `grid` that bands cut."""
    warm_up: int = 1
    """Number of first steps whose calls are exact in every mode."""
    text_in_bands: bool = False
    """Whether text runs with every band, as in xDiT. False: only with the first band, as in this product."""
    streams: tuple[tuple[int, int], ...] = ()
    """See Counted."""
    trials: Trials | None = None
    """The trials of the class. None: nothing is known against any mode."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The first block of each kind."""
        return tuple(dict.fromkeys(self.blocks))

    @property
    def image(self) -> int:
        return math.prod(self.grid)

    @property
    def rows(self) -> int:
        """Number of image tokens along the axis that bands cut."""
        return self.grid[self.band_dim]

    @property
    def tokens(self) -> int:
        """Number of tokens of a whole call."""
        return self.image + self.text

    @property
    def warm_up_steps(self) -> int:
        return min(self.warm_up, self.steps)

    def band_image(self, bands: int, first: bool) -> float:
        """Return the image tokens of a band: of the call's first one, or the mean of the others."""
        first_band, *others = self.bands(bands)
        return first_band if first else fmean(others)

    def bands(self, count: int) -> list[int]:
        """Return the image tokens of each of `count` bands, as banded_run.cut_rows cuts them."""
        row = self.image // self.rows
        spans = split_carrying(Span(0, self.rows), count, 0.0 if self.text_in_bands else self.text / row)
        return [row * len(span) for span in spans]

    def request(self, exact: bool, bands: int) -> Request:
        """Return the memory request of the run. `exact`: no keys and values are stored from call to call."""
        kept = 0 if exact or self.warm_up_steps == self.steps else KV_COPIES
        request = Request(self.grid, 0, self.text, self.entries, 0, kept, bands, self.band_dim)
        return replace(request, streams=self.streams)


def workload_of(
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    shape: tuple[int, ...],
    entries: int,
    steps: int,
    prompt: int,
    transfer_dtype: str = "full",
) -> Workload:
    """Return the workload of a sampling run. `shape`: [B, C, (T,) H, W] of the latent. `transfer_dtype`: see
    core.setup.Setup. Raises ValueError if the latent has no frames and the model is for videos."""
    built = checkpoint.built
    grid = built.patching.grid(shape)
    if len(shape) != 2 + len(grid):
        raise ValueError(
            f"latent_image: the latent has {len(shape)} axes, this model needs {2 + len(grid)}. Use the Empty Latent node "
            "made for this model."
        )
    request = expected_request(checkpoint, shape, entries, prompt)
    sizes = replace(model_sizes(checkpoint, dtype, device), transfer_dtype=transfer_dtype)
    kinds: dict[tuple[str, tuple[StreamKeys, ...]], str] = {}
    blocks = zip(built.own.blocks, sizes.attention, strict=True)
    return Workload(
        name=checkpoint.path.name,
        kind=built.title,
        dtype=dtype,
        shape=(shape[0], 1 if built.call is None else built.call.latents[0].shape[1], *shape[2:]),
        entries=entries,
        steps=steps,
        prompt=prompt,
        blocks=tuple(kinds.setdefault((list_of(block.name), attention), block.name) for block, attention in blocks),
        sizes=sizes,
        grid=request.grid,
        text=request.text,
        band_dim=request.band_dim,
        streams=request.streams,
    )


def list_of(block: str) -> str:
    """Return the name of the list that contains a block."""
    return block.rpartition(".")[0]
