"""What a model's memory depends on, from its file's header: bytes of its blocks and of what is around them, its attention.

Nothing is read but headers.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.block_residency import device_bytes, least_bytes, streamed_blocks
from parallel_backend.core.degrees import Coordinate, Degrees
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.spans import Span, split
from parallel_backend.core.validate import check_model
from parallel_backend.families.base.blocks import JOINT, PAIRED
from parallel_backend.families.base.tensor_plan import cut_of, cut_outside


@dataclass(frozen=True)
class ModelSizes:
    """What a model's memory depends on, and which degrees it allows. Blocks of all lists are counted through."""

    block_bytes: tuple[int, ...]
    """Bytes of each block's weights."""
    ends: tuple[int, int, int]
    """Bytes of the other weights: see ends_bytes."""
    attention: tuple[tuple[str, ...], ...]
    """For each block, which tokens each of its attention layers is over."""
    prologue: tuple[str, ...]
    """The same for the attention layers that the first stage has beside its blocks."""
    heads: int
    key_heads: int | None
    """Heads of keys and values. None: as many as `heads`."""
    head_size: int
    hidden: int
    """Channels of a token between blocks."""
    itemsize: int
    """Bytes of a value that is computed with."""
    joint: bool
    """Text tokens run through the blocks."""
    expanded: int = 0
    """Bytes of the largest packed weight of a linear layer once it is expanded, as it is at each use."""
    on_gpus: bool = False
    """Ranks have a GPU's libraries."""
    tensor_degrees: frozenset[int] | None = None
    """Those that the file's quantised weights can be cut to. None: all."""
    cut_ends: tuple[int, int, int] = (0, 0, 0)
    """Of `ends`, the bytes that tensor ranks share."""
    transfer_dtype: str = "full"
    """See loading.Load."""
    text_head_size: int | None = None
    """Of attention over a text stream with channels of its own, or between it and the image. None: `head_size`."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.block_bytes) + sum(self.ends)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.hidden * self.itemsize

    def check(self, degrees: Degrees) -> None:
        """Raise ValueError, naming the widget, for degrees that the model does not allow."""
        check_model(
            degrees,
            heads=self.heads,
            blocks=len(self.block_bytes),
            key_heads=self.key_heads,
            tensor_degrees=self.tensor_degrees,
        )

    def key_heads_on(self, degrees: Degrees, at: Coordinate) -> int:
        """Whose keys and values a rank keeps: once for the heads that share them, unless some of these are elsewhere."""
        groups = self.key_heads or self.heads
        sharing = self.heads // groups
        own = split(Span(0, len(split(Span(0, groups), degrees.tensor)[at.tensor]) * sharing), degrees.ulysses)[at.ulysses]
        return len(own) if own.start % sharing or own.stop % sharing else len(own) // sharing


@dataclass(frozen=True)
class RankWeights:
    """A rank's weights, in bytes."""

    ends: int
    """Of all that is in no counted block. It never leaves the device while the rank computes."""
    blocks: tuple[int, ...]
    """Of its blocks, in their order."""

    @property
    def total(self) -> int:
        return self.ends + sum(self.blocks)

    @property
    def least(self) -> int:
        """The fewest on the device with which the rank computes: all blocks are streamed."""
        return self.ends + least_bytes(self.blocks)

    def streamed(self, resident: int) -> int:
        """Bytes that each micro-step brings to the device, where weights may have `resident` bytes of it."""
        return sum(self.blocks[index] for index in self.streamed_blocks(resident))

    def on_device(self, resident: int) -> int:
        """Bytes that weights then take on the device, slots included."""
        return self.ends + device_bytes(self.blocks, self.streamed_blocks(resident))

    def streamed_blocks(self, resident: int) -> tuple[int, ...]:
        """Indices into `blocks`."""
        return streamed_blocks(self.blocks, resident - self.ends)


def model_sizes(checkpoint: Checkpoint, dtype: str, device: str) -> ModelSizes:
    """Of ranks on devices like `device`."""
    family, config = checkpoint.family, checkpoint.config
    lists = block_lists(checkpoint)
    parts = [target.split(".") for target in checkpoint.key_map]
    modules = {".".join(names[:count]) for names in parts for count in range(2, len(names))}

    def layers(name: str, over: dict[str, str]) -> tuple[str, ...]:
        found = [tokens for layer, tokens in over.items() if f"{name}.{layer}" in modules]
        # PAIRED keeps the keys of two streams.
        return tuple(tokens for kind in found for tokens in ((JOINT, JOINT) if kind == PAIRED else (kind,)))

    attention, prologue = [], []
    for spec in family.blocks.lists:
        indices = sorted({int(names[1]) for names in parts if names[0] == spec.name})
        found = [layers(f"{spec.name}.{index}", dict(spec.attention)) for index in indices]
        if spec.prologue:
            prologue += [tokens for block in found for tokens in block]
        else:
            attention += found
    on_gpus, text_hidden = "cuda" in device, family.sizes.text_hidden(config)
    computed = compute_dtype(dtype, torch.device("cuda" if on_gpus else "cpu")).itemsize
    return ModelSizes(
        tuple(block_bytes(checkpoint, lists, dtype, 1)),
        ends_bytes(checkpoint, dtype),
        tuple(attention),
        tuple(prologue),
        family.sizes.heads(config),
        family.sizes.key_heads(config),
        family.sizes.head_size(config),
        family.sizes.hidden(config),
        computed,
        joint_text(checkpoint),
        computed * _largest_packed(checkpoint, dtype),
        on_gpus,
        checkpoint.tensor_degrees,
        ends_bytes(checkpoint, dtype, functools.partial(_is_cut, checkpoint)),
        text_head_size=text_hidden and text_hidden // family.sizes.heads(config),
    )


def _largest_packed(checkpoint: Checkpoint, dtype: str) -> int:
    """Values of the largest matrix that ranks keep packed; 0 if they keep none so."""
    shapes = ((target, checkpoint.shape(target)) for target in checkpoint.key_map)
    packed = (shape for target, shape in shapes if len(shape) == 2 and checkpoint.storage(target, dtype))
    return max(map(math.prod, packed), default=0)


def block_lists(checkpoint: Checkpoint) -> list[str]:
    """For each block, all lists counted through, the list that it is in."""
    counts = checkpoint.family.blocks.counts(checkpoint.config)
    return [name for name, count in counts.items() for _ in range(count)]


def block_bytes(checkpoint: Checkpoint, lists: list[str], dtype: str, tensor: int) -> list[int]:
    """Bytes of each block's weights on one rank. `lists`: see block_lists."""
    sizes = dict.fromkeys(((name, index) for index, name in _numbered(lists)), 0)
    for target in checkpoint.key_map:
        name, _, rest = target.partition(".")
        if name in lists:
            sizes[name, int(rest.partition(".")[0])] += checkpoint.nbytes(target, dtype) // tensor
    return list(sizes.values())


def _numbered(lists: list[str]) -> list[tuple[int, str]]:
    """Each block's index in its own list."""
    return [(lists[:place].count(name), name) for place, name in enumerate(lists)]


def joint_text(checkpoint: Checkpoint) -> bool:
    """Whether text tokens run through the blocks, beside the image's."""
    return any(spec.joined or "text" in spec.returns for spec in checkpoint.family.blocks.lists if not spec.prologue)


def _is_cut(checkpoint: Checkpoint, target: str) -> bool:
    """Whether tensor ranks share a parameter. All large matrices count as weights of linear layers."""
    family, shape = checkpoint.family, checkpoint.shape(target)
    if cut_of(family.tensor_plan, target):
        return True
    layer, _, leaf = target.rpartition(".")
    matrix = leaf == "weight" and len(shape) == 2
    return matrix and cut_outside(family.tensor_plan, layer, shape, family.forward.weight_readers)


def ends_bytes(
    checkpoint: Checkpoint, dtype: str, which: Callable[[str], bool] = lambda target: True
) -> tuple[int, int, int]:
    """Bytes of the weights of no counted block that the first, the last, every stage has. `which`: parameters that count."""
    family = checkpoint.family
    counted = {spec.name for spec in family.blocks.lists if not spec.prologue}
    prologue = {*family.blocks.prologue, *(spec.name for spec in family.blocks.lists if spec.prologue)}
    first = last = shared = 0
    for target in filter(which, checkpoint.key_map):
        top, size = target.partition(".")[0], checkpoint.nbytes(target, dtype)
        if top in prologue:
            first += size
        elif top in family.blocks.epilogue:
            last += size
        elif top not in counted:
            shared += size
    return first, last, shared


def rank_weights(sizes: ModelSizes, tensor: int, span: Span) -> RankWeights:
    """Of a rank of the stage with blocks `span`, one of `tensor` that share each block."""
    first, last, shared = (end - part + part // tensor for end, part in zip(sizes.ends, sizes.cut_ends, strict=True))
    ends = shared + (first if span.start == 0 else 0) + (last if span.stop == len(sizes.block_bytes) else 0)
    return RankWeights(ends, tuple(size // tensor for size in sizes.block_bytes[span.slice]))
