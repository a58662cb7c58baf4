"""The sizes of a model that determine its memory, from its files' headers: bytes of weights, heads, attention layers."""

from dataclasses import dataclass

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.block_residency import device_bytes, least_bytes, streamed_blocks
from parallel_backend.core.degrees import Coordinate, Degrees
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.spans import Span, split, split_units
from parallel_backend.core.validate import check_model
from parallel_backend.own_class.built.built_class import StreamKeys


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that determine a model's memory, and the degrees that it allows. Block numbers are consecutive over all
    lists of blocks."""

    block_bytes: tuple[int, ...]
    """Bytes of each block's weights."""
    ends: int
    """Bytes of the other weights, which each stage has."""
    attention: tuple[tuple[StreamKeys, ...], ...]
    """For each block, the keys of each attention layer."""
    heads: int
    sharing: int
    """Number of neighbouring heads that have the same keys and values."""
    head_size: int
    hidden: int
    """Channels of a token between blocks."""
    itemsize: int
    """Bytes of a value in the compute dtype."""
    joint: bool
    """Whether text tokens run through the blocks."""
    tensor_degrees: frozenset[int] | None = None
    """Tensor degrees by which the file's quantized weights can be cut. None: all."""
    transfer_dtype: str = "full"
    """See core.setup.Setup."""
    measured: float = 1.0
    """Measured activations of runs of this model, relative to the estimate. 1: no device has measured them."""
    head_units: int = 0
    """See OwnClass.head_units."""
    steady: bool = False
    """See OwnLatent.steady."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.block_bytes) + self.ends

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.hidden * self.itemsize

    def check(self, degrees: Degrees) -> None:
        """Raise ValueError, naming the widget, for degrees that the model does not allow."""
        check_model(degrees, len(self.block_bytes), self.heads, self.head_units, self.tensor_degrees)

    def key_heads_on(self, degrees: Degrees, at: Coordinate) -> int:
        """Return the number of heads of keys and values that a rank stores.

        Query heads that share keys and values store them once, if the cut leaves them all on this rank. Otherwise the rank
        stores them once for each query head, as they are transferred.
        """
        tensor_heads = split_units(Span(0, self.heads), degrees.tensor, self.head_units or self.heads)[at.tensor]
        heads = split(Span(0, len(tensor_heads)), degrees.ulysses)[at.ulysses]
        return len(heads) if heads.start % self.sharing or heads.stop % self.sharing else len(heads) // self.sharing


@dataclass(frozen=True)
class RankWeights:
    """A rank's weights, in bytes."""

    ends: int
    """Bytes of the weights outside the blocks. They never leave the device while the rank computes."""
    blocks: tuple[int, ...]
    """Bytes of each block, in their order."""

    @property
    def total(self) -> int:
        return self.ends + sum(self.blocks)

    @property
    def least(self) -> int:
        """The fewest bytes on the device with which the rank computes: all blocks are streamed."""
        return self.ends + least_bytes(self.blocks)

    def streamed(self, resident: int) -> int:
        """Return the bytes that each micro-step copies to the device, if weights may take `resident` bytes there."""
        return sum(self.blocks[index] for index in self.streamed_blocks(resident))

    def on_device(self, resident: int) -> int:
        """Return the bytes that weights take on the device, including slots, if they may take `resident` bytes there."""
        return self.ends + device_bytes(self.blocks, self.streamed_blocks(resident))

    def streamed_blocks(self, resident: int) -> tuple[int, ...]:
        """Return the indices into `blocks` of the streamed blocks, if weights may take `resident` bytes on the device."""
        return streamed_blocks(self.blocks, resident - self.ends)


def model_sizes(checkpoint: Checkpoint, dtype: str, device: str) -> ModelSizes:
    """Return the sizes on ranks whose devices are like `device`. `dtype`: of the weights, as in Setup."""
    built, ends = checkpoint.built, 0
    blocks = {(name, index): 0 for name, count in built.counts.items() for index in range(count)}
    for target in checkpoint.key_map:
        if (place := built.place(target)) is not None:
            blocks[place] += checkpoint.nbytes(target, dtype)
        elif not built.is_elsewhere(target):
            ends += checkpoint.nbytes(target, dtype)
    computed = compute_dtype(dtype, torch.device("cuda" if "cuda" in device else "cpu")).itemsize
    return ModelSizes(
        tuple(blocks.values()),
        ends,
        built.attention,
        built.own.heads,
        built.own.sharing,
        built.own.head_size,
        built.hidden,
        computed,
        built.own.joint,
        checkpoint.tensor_degrees,
        head_units=built.own.head_units,
        steady=built.own.steady,
    )


def block_lists(checkpoint: Checkpoint) -> list[str]:
    """Return the name of each block's list."""
    counts = checkpoint.built.counts
    return [name for name, count in counts.items() for _ in range(count)]


def weights_of_blocks(sizes: ModelSizes, degrees: Degrees) -> tuple[int, ...]:
    """Return the bytes of each block's weights on one of the ranks that have it."""
    return tuple(size // degrees.tensor for size in sizes.block_bytes)


def rank_weights(sizes: ModelSizes, degrees: Degrees, span: Span) -> RankWeights:
    """Return the weights of a rank of the stage with the blocks `span`."""
    return RankWeights(sizes.ends, weights_of_blocks(sizes, degrees)[span.slice])


def weights_by_rank(sizes: ModelSizes, degrees: Degrees, spans: tuple[Span, ...]) -> list[RankWeights]:
    """Return the weights of each rank. `spans`: the blocks of each stage."""
    return [rank_weights(sizes, degrees, spans[degrees.coordinate(rank).pipe]) for rank in range(degrees.world)]
