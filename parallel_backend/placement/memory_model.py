"""The only memory model: bytes of weights, keys and values, and activations on a rank.

The planner, Parallel Doctor and the check before a model is loaded and before a run (memory_check.py) use it. Weights and
K/V buffers are counted exactly. Activations are an estimate until a GPU has measured a run's steps. Memory of a GPU's
libraries is not counted: they have most of it when free memory is read before a run.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from parallel_backend.core.degrees import Coordinate, Degrees
from parallel_backend.core.packed_values import change_bits, change_bytes
from parallel_backend.core.spans import Span, split, split_carrying
from parallel_backend.own_class.built.built_class import WHOLE_STATES, StreamKeys

from .model_sizes import ModelSizes, rank_weights, weights_of_blocks

USABLE_MEMORY = 0.95
"""Fraction of free memory that an estimate may fill. The rest is the allocator's slack: torch's rounds large sizes up to 2
MB (CUDACachingAllocator), and gaps stay between tensors. It has not been measured on a GPU."""
WEIGHTS_SHARE = 0.85
"""Fraction of a device's free memory that weights may take if no run is known. The rest is for a run."""
KV_COPIES = 2
"""Sets of K/V buffers if keys of the last two steps are stored, from which this step's are extrapolated linearly."""
ACTIVATIONS = {True: 20, False: 16}
"""Number of hidden states of a micro-step's tokens that are in memory at once on one rank, at the peak of a block, until a
device has measured runs (ModelSizes.measured). True: text runs through the blocks with the image. They are the input,
normalized and as queries, keys and values, attention's result, 4 hidden sizes of the feed-forward twice, rotary tables,
norms in float32. Measured, 1,024 to 1,152 wide, fp32 and bf16, a whole call and a band: Flux 15 to 18, Qwen-Image 15 to 16,
SD3 13 to 14, Z-Image 17 to 21, Lumina 2 19 to 20 (in bf16 28 to 30, as its rotary embedding is complex); PixArt 12 to 13,
Wan 13 to 15, LTX-Video 12 to 17."""
WHOLE_ON_TENSOR_RANKS, MORE_ON_SEQUENCE_RANKS = 0.35, 0.085
"""Fraction of the hidden states at the peak that tensor ranks do not share, and the fraction that each additional sequence
rank adds. The ratios are within a fifth of the medians of eleven models that were traced with real sizes
(benchmarks/sizes/states.py)."""
TIMED = {True: 3, False: 18}
"""Additional hidden states if each token has a timestep, as with a given first frame: the modulation of each token.
Measured, fp32 and bf16: Cosmos Predict2 11 and 11, LTX-Video 13 and 13, Wan 19 and 27; LTX-2, whose text runs through the
blocks (True), 3 and 3."""
LEAST = 1.0, 3.0
"""Number of hidden states that every block certainly has at once: its input; queries, keys and values of the rank's
heads."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one rank needs."""

    weights: int
    buffers: int
    """Keys and values that are stored from call to call."""
    activations: int
    """Other tensors at the peak of a micro-step."""
    arriving: int = 0
    """Keys and values of other ranks that arrive during a call for the next one (displaced patches)."""
    least: int = 0
    """The certain part of the activations."""

    @property
    def total(self) -> int:
        return self.weights + self.run

    @property
    def run(self) -> int:
        """Bytes at the peak of a run in addition to the weights."""
        return self.buffers + self.arriving + self.activations

    @property
    def certain(self) -> int:
        """The part of `run` that is certain, not estimated."""
        return self.buffers + self.arriving + self.least


@dataclass(frozen=True)
class Request:
    """The properties of model calls for one conditioning that determine their memory."""

    grid: tuple[int, ...]
    """Number of the image's tokens along each axis. It may also have other tokens (BuiltClass.counted)."""
    references: int
    """Tokens of reference images."""
    text: int
    """Text tokens."""
    entries: int
    """Batch entries of a call."""
    first_replica: int = 0
    """The replica that gets the first entries."""
    kept: int = 0
    """Number of sets of keys and values that a run stores from call to call; 0 for exact calls."""
    bands: int = 1
    band_dim: int = -2
    """The axis of `grid` that bands cut."""
    timed: bool = False
    """Whether each token has its own timestep."""
    together: bool = False
    """Whether all entries are on the first replica."""
    added: int = 0
    """Number of tensors of hidden states that controls add after blocks."""
    streams: tuple[tuple[int, int], ...] = ()
    """See Counted."""

    @property
    def image(self) -> int:
        return math.prod(self.grid) + self.references

    def entries_on(self, degrees: Degrees, at: Coordinate) -> int:
        """Return the batch entries of the rank at these coordinates, as in call.Conditioning.shares."""
        number = (at.batch - self.first_replica) % degrees.batch
        if self.together:
            return 0 if number else self.entries
        return len(split(Span(0, self.entries), degrees.batch)[number])


def step_tokens(image: int, rows: int, text: int, entries: int, stages: int, bands: int) -> tuple[int, int]:
    """Return (tokens of a micro-step of a whole call, tokens of the largest band's micro-step). Tokens of several batch
    entries are added up. See banded_run.cut_rows. `rows`: token rows of the image, or frames, that bands cut. A whole call's
    entries go through a pipeline one by one."""
    whole = (entries if stages == 1 else 1) * (image + text)
    if bands == 1:
        return whole, whole
    row = image / rows
    first, *others = (row * len(span) for span in split_carrying(Span(0, rows), min(bands, rows), text / row))
    return whole, entries * math.ceil(max([first + text, *others]))


def memory_of(
    sizes: ModelSizes, degrees: Degrees, spans: tuple[Span, ...], rank: int, requests: tuple[Request, ...]
) -> MemoryNeed:
    """Return the bytes on one rank. `spans`: the blocks of each stage. The buffers of all requests are in memory at once."""
    at = degrees.coordinate(rank)
    span = spans[at.pipe]
    computing = [_computing(sizes, degrees, at, request) for request in requests]
    tokens = [_step_tokens(sizes, degrees, at, request) for request in requests]
    # A rank copies all additions before the first block (stage_forward.py).
    additions = (each.added * max(step) for each, step in zip(requests, tokens, strict=True))
    added = max(additions, default=0) * sizes.token_bytes
    return MemoryNeed(
        rank_weights(sizes, degrees, span).total,
        sum(buffer_bytes(sizes, degrees, span, at, request) for request in requests),
        max((likely for _, likely in computing), default=0) + added,
        sum(_arriving_bytes(sizes, degrees, span, at, request) for request in requests),
        max((least for least, _ in computing), default=0) + added,
    )


def memory_by_rank(
    sizes: ModelSizes, degrees: Degrees, spans: tuple[Span, ...], requests: tuple[Request, ...]
) -> list[MemoryNeed]:
    """`memory_of` each rank."""
    return [memory_of(sizes, degrees, spans, rank, requests) for rank in range(degrees.world)]


def bytes_by_block(sizes: ModelSizes, degrees: Degrees, requests: tuple[Request, ...]) -> list[int]:
    """Bytes of each block's weights and of the keys and values that these requests store for it, on the rank with most."""
    coordinates = (degrees.coordinate(rank) for rank in range(degrees.world))
    places = {replace(at, pipe=0, patch=0, ring=0) for at in coordinates}  # along these axes all ranks keep as much

    def kept(block: Span, at: Coordinate) -> int:
        parts = ((sizes, degrees, block, at, request) for request in requests)
        return sum(buffer_bytes(*part) + _arriving_bytes(*part) for part in parts)

    return [
        size + max(kept(Span(index, index + 1), at) for at in places)
        for index, size in enumerate(weights_of_blocks(sizes, degrees))
    ]


def bytes_outside_blocks(sizes: ModelSizes, degrees: Degrees, request: Request) -> int:
    """Bytes of a run in addition to the blocks' weights, keys and values, on a rank with all weights outside the blocks."""
    uncut = (Span(0, len(sizes.block_bytes)),) * degrees.pipe
    needs = memory_by_rank(sizes, degrees, uncut, (request,))
    return sizes.ends + max(need.activations for need in needs)


def buffer_bytes(sizes: ModelSizes, degrees: Degrees, span: Span, at: Coordinate, request: Request) -> int:
    """Return the bytes that kv_buffer.py allocates for the blocks `span`, on the rank at these coordinates. For exact calls,
    bytes of the stored keys of steady text (attention/words.py)."""
    layers = [keys for block in sizes.attention[span.slice] for keys in block]
    image, copies = (request.image, request.kept) if request.kept or degrees.naive or not sizes.steady else (0, 1)
    values = head_values(layers, image, request.text, request.streams)
    heads = request.entries_on(degrees, at) * sizes.key_heads_on(degrees, at)
    return int(2 * copies * heads * int(values) * sizes.itemsize)


def head_values(layers: Iterable[StreamKeys], image: float, text: int, streams: tuple[tuple[int, int], ...] = ()) -> float:
    """Return the number of values in one head's keys in these attention layers. `streams`: see Request."""
    others = dict(streams)

    def values(keys: StreamKeys) -> float:
        of_streams = sum(others[stream] for stream in keys.streams if text) if others else text * bool(keys.streams)
        return keys.head_size * (image * keys.image + of_streams)

    return sum(map(values, layers))


def _arriving_bytes(sizes: ModelSizes, degrees: Degrees, span: Span, at: Coordinate, request: Request) -> int:
    """Return the bytes of this call's keys and values of all ranks, which the next call reads. 0 unless patches are
    displaced."""
    if not degrees.displaced or not request.kept:
        return 0
    keys = buffer_bytes(sizes, degrees, span, at, request) // request.kept
    if not (bits := change_bits(sizes.transfer_dtype)):
        return keys
    # Changes are sent quantised, so a rank also keeps the values that all ranks have decoded so far.
    return keys + change_bytes(keys // sizes.itemsize, sizes.head_size, bits)


def _step_tokens(sizes: ModelSizes, degrees: Degrees, at: Coordinate, request: Request) -> tuple[int, int]:
    """`step_tokens` for the rank's share of the batch."""
    entries = request.entries_on(degrees, at)
    text = _text(sizes, request)
    stages = 1 if request.together else degrees.pipe
    bands = request.bands if request.kept else 1
    return step_tokens(request.image, request.grid[request.band_dim], text, entries, stages, bands)


def _text(sizes: ModelSizes, request: Request) -> int:
    """Return the number of text tokens that run through the blocks."""
    return request.text if sizes.joint else 0


def states_by_ranks(degrees: Degrees) -> float:
    """Return the hidden states of a rank's tokens at the peak, relative to those of a single rank."""
    of_tensor_ranks = WHOLE_ON_TENSOR_RANKS + (1 - WHOLE_ON_TENSOR_RANKS) / degrees.tensor
    return of_tensor_ranks + MORE_ON_SEQUENCE_RANKS * (degrees.sequence - 1)


def _computing(sizes: ModelSizes, degrees: Degrees, at: Coordinate, request: Request) -> tuple[int, int]:
    """Return the bytes of activations: (the certain part, the estimate)."""
    entries = request.entries_on(degrees, at)
    if not entries:
        return 0, 0
    whole, band = _step_tokens(sizes, degrees, at, request)
    token_bytes = sizes.token_bytes
    least = min(whole, band) / degrees.sequence * token_bytes * (LEAST[0] + LEAST[1] / degrees.tensor)
    part = max(whole, band) / degrees.sequence
    states = ACTIVATIONS[sizes.joint] * states_by_ranks(degrees) + (TIMED[sizes.joint] if request.timed else 0)
    # Between stages: two that are sent, as at most two sends are in progress (StageLink.send), and one that comes.
    states += 2 * (at.pipe < degrees.pipe - 1) + (at.pipe > 0)
    estimate = round(states * part * token_bytes)
    tokens = whole if whole == band else entries * (request.image + _text(sizes, request))
    if part < tokens:
        estimate += WHOLE_STATES * tokens * token_bytes
    return math.floor(least), max(math.floor(least), round(estimate * sizes.measured))
