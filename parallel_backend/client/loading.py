"""Loads a checkpoint onto the ranks of a pool: makes room, cuts the blocks into stages, and has every rank load its part."""

import threading
from statistics import fmean

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.devices import on_ray
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.setup import Setup
from parallel_backend.core.validate import check_devices
from parallel_backend.placement.balance import Balance, even_stages
from parallel_backend.placement.memory_check import MemoryCheck, devices_for
from parallel_backend.placement.memory_model import Request
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import DeviceFull, LoadProgress, Poll, RankError, wait_for
from parallel_backend.processes.pool_part import SomeRanks
from parallel_backend.wire import messages as m

from .conditioning_cache import ConditioningCache
from .lora import Adaptation
from .measured_balance import balance
from .memory_guard import Learnt, MakeRoom, MemoryGuard, no_room
from .not_finite import not_finite
from .posting import Posting
from .remote_transformer import RemoteTransformer
from .shared_residuals import SharedResiduals


class NoRoomToLoad(DeviceFull):
    """A device ran out of memory while a model was loaded. `next_try`: see MemoryGuard.learn."""

    def __init__(self, text: str, rank: int = 0, asked: int = 0, next_try: str = ""):
        super().__init__(text, rank, asked)
        self.next_try = next_try


def load_model(
    pool: SomeRanks,
    checkpoint: Checkpoint,
    setup: Setup,
    poll: Poll,
    progress: LoadProgress = lambda doing, fraction: None,
    make_room: MakeRoom = no_room,
    expected: Request | None = None,
    keep_others: bool = False,
    learnt: Learnt | None = None,
) -> RemoteTransformer:
    """The model of `setup`, whose files are `checkpoint`, on the ranks of `pool`. Returns when every rank has its part.

    `make_room` is asked for memory on the ranks' GPUs, before loading and before runs. `expected`: the run for which the
    model is cut; the cut stays for runs of other sizes. `keep_others`: other models on the ranks stay. `learnt`: see
    MemoryGuard. ValueError, naming the widget, if the model cannot be cut so;
    RankError if a rank fails, NoRoomToLoad if its device has too little memory.
    """
    degrees, built = setup.degrees, checkpoint.built
    check_devices(degrees, pool.devices)
    checkpoint.check_degrees(degrees)
    ranks, lock = ModelRanks(pool, keep_others), threading.RLock()
    if not pool.ready.done():
        progress(f"starting {len(pool.devices)} ranks", 0.0)
    wait_for(pool.ready, poll)
    progress("loading", 0.0)
    even = even_stages(len(built.own.blocks), degrees.pipe)
    check = MemoryCheck(checkpoint, setup, even, devices_for(pool.devices))
    memory = MemoryGuard(ranks, check, built, make_room, lock, learnt)
    requests = () if expected is None else (expected,)
    memory.make_room_for(requests, poll)
    cut = balance(pool, checkpoint, setup, poll, expected, memory.copy_rates)
    memory.memory_check.spans = cut.stage_blocks
    memory.check_weights(requests, poll)
    replies = _load(ranks, _message(pool, checkpoint, setup, cut, memory), memory, poll, progress)
    memory.resident.loaded(replies)
    held = f"{_size(sum(memory.resident.device_bytes))} of weights on {len(replies)} rank" + "s" * (len(replies) > 1)
    streamed = memory.memory_check.said_of_streaming(memory.resident.limits)
    progress(", ".join(filter(None, (held, streamed, *pool.notes))), 1.0)
    adaptation = Adaptation(ranks, checkpoint, replies, memory.resident.adapted)
    sequence = SequenceCut(cut.patch_shares, degrees.ring * degrees.ulysses, degrees.naive)
    posting = Posting(
        degrees,
        built.patching.frames * built.patching.side**2,
        sequence,
        ranks,
        SharedResiduals(degrees, ranks),
        ConditioningCache(checkpoint, ranks, degrees),
        lambda call: not_finite(setup.dtype, adaptation.present, bool(call.residuals)),
        memory.resident,
        lock,
    )
    return RemoteTransformer(checkpoint, setup, cut, memory, posting, adaptation)


def _size(nbytes: int) -> str:
    """Return the size as text, in GB with one decimal, or in MB if that would be 0.0."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def _message(pool: SomeRanks, checkpoint: Checkpoint, setup: Setup, cut: Balance, memory: MemoryGuard) -> m.Load:
    elsewhere = any(map(on_ray, pool.devices))
    return m.Load(
        setup=setup,
        stage_blocks=cut.stage_blocks,
        patch_shares=cut.patch_shares,
        fingerprint=checkpoint.fingerprint() if elsewhere else "",
        resident=memory.resident.for_loading,
        ranks=pool.part_ranks,
        threads=pool.threads if pool.part_ranks else 0,
        file_state="" if elsewhere else checkpoint.file_state,
    )


def _load(ranks: ModelRanks, message: m.Load, memory: MemoryGuard, poll: Poll, progress: LoadProgress) -> list[m.Loaded]:
    def look() -> None:
        poll()
        progress("loading", fmean(ranks.loaded))

    try:
        return wait_for(ranks.ask(message, m.Loaded), look)
    except DeviceFull as error:
        told = str(memory.explained(error))
        raise NoRoomToLoad(told, error.rank, error.asked, memory.learn(error)) from None
    except RankError as error:
        raise memory.explained(error) from None
