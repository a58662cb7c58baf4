"""Cuts a model over its ranks: as the user says, evenly, or by measured times of its blocks."""

from collections.abc import Sequence
from dataclasses import replace

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.setup import Setup
from parallel_backend.placement.balance import (
    Balance,
    check_stage_split,
    divide,
    even_stages,
    spill_seconds,
    stages_by_size,
    timed_rows,
)
from parallel_backend.placement.memory_model import Request, bytes_by_block, bytes_outside_blocks
from parallel_backend.placement.model_sizes import block_lists, model_sizes
from parallel_backend.processes.pool import Poll
from parallel_backend.processes.pool_part import SomeRanks

from .measurements import measured_blocks, probe_of


def balance(
    pool: SomeRanks,
    checkpoint: Checkpoint,
    setup: Setup,
    poll: Poll,
    expected: Request | None = None,
    copy_rates: Sequence[float] = (),
) -> Balance:
    """Cut the model. If `stage_split` is auto and there is a choice, the ranks drop their models and time its blocks.

    `expected`: the run for which the model is loaded. Blocks are timed with its number of tokens, and stages leave memory
    for its buffers and computation. `copy_rates`: by rank, see spill_seconds.
    """
    degrees, stage_split, dtype, lists = setup.degrees, setup.stage_split, setup.dtype, block_lists(checkpoint)
    by_hand = check_stage_split(stage_split, degrees.pipe, len(lists))
    even = (1 / degrees.patch,) * degrees.patch
    if by_hand is not None or stage_split.strip().lower() == "even" or degrees.pipe == degrees.patch == 1:
        return Balance(by_hand or even_stages(len(lists), degrees.pipe), even, None)
    rows = timed_rows(expected, degrees, on_gpus=all("cuda" in device for device in pool.devices))
    model = model_sizes(checkpoint, dtype, pool.devices[0])
    if (probe := probe_of(checkpoint, dtype, rows)) is None:
        return Balance(stages_by_size(model.block_bytes, degrees.pipe), even, None)
    probes = measured_blocks(pool, probe[0], lists, poll)
    sizes = bytes_by_block(model, degrees, () if expected is None else (expected,))
    other_bytes = None if expected is None else bytes_outside_blocks(model, degrees, expected)
    cut = divide(degrees, lists, sizes, probes, other_bytes=other_bytes, spill=spill_seconds(copy_rates, expected))
    return replace(cut, timed_tokens=probe[1][0])
