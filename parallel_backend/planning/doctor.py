"""The whole of it: look at the machine, rehearse every mode, predict, advise."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.placement.balance import ALIKE
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Poll, Pool, wait_for
from parallel_backend.wire.lifecycle import Unload, Unloaded

from .links import HostFree, look_at
from .modes import Mode, needed, possible
from .prediction import Prediction, Rehearsals
from .rehearsal import rehearse
from .workload import Workload

AS_GOOD = 1.03
"""Modes within this factor of the fastest count as equally fast: the simplest of them is advised."""

Progress = Callable[[int, int], None]
"""(done, of how many)."""


@dataclass(frozen=True)
class Findings:
    """`predictions`: fastest first, those that do not fit too; of one rank, that of the best device. `refused`: degrees that
    cannot be, and why. `advice`: None if nothing fits.
    """

    situation: Rehearsals
    predictions: tuple[Prediction, ...]
    refused: dict[Degrees, str]
    advice: Prediction | None

    @property
    def one_rank(self) -> Prediction:
        return next(found for found in self.predictions if found.mode.device is not None)


def examine(
    pool: Pool,
    checkpoint: Checkpoint,
    subject: Workload,
    attention: str,
    host_free: HostFree,
    poll: Poll,
    progress: Progress = lambda _done, _total: None,
) -> Findings:
    """Takes the ranks' model away and leaves them without one. RankError if a rank fails, also for want of memory."""
    world = len(pool.devices)
    modes, _ = possible(subject, world) if world > 1 else ([], {})
    return conclude(measure(pool, checkpoint, subject, modes, attention, host_free, poll, progress))


def measure(
    pool: Pool,
    checkpoint: Checkpoint,
    subject: Workload,
    modes: list[Mode],
    attention: str,
    host_free: HostFree,
    poll: Poll,
    progress: Progress = lambda _done, _total: None,
) -> Rehearsals:
    """All that these modes, and one rank, are predicted from."""
    wait_for(pool.ready, poll)
    machine = look_at(pool, host_free, poll)
    cuts = [list(same) for _, same in itertools.groupby(needed(modes, subject), key=lambda kind: kind.cut)]
    # CPU ranks have no device of their own: what else the machine does, or its clock, must not fall on one mode alone.
    cuts += cuts[::-1] if machine.on_cpus else []
    total, done = 1 + sum(map(len, cuts)), itertools.count(1)
    situation = Rehearsals(subject, machine, {})

    def advance() -> None:
        progress(next(done), total)

    advance()
    for same in cuts:
        uneven = same[0].cut.patch > 1 and _uneven(situation)
        found = rehearse(pool, checkpoint, subject, same, attention, uneven, poll, advance)
        for kind, call in found.items():
            before = situation.rehearsed.get(kind)
            situation.rehearsed[kind] = call if before is None else before.quicker(call)
    wait_for(pool.ask(Unload(), Unloaded), poll)
    return situation


def conclude(situation: Rehearsals) -> Findings:
    """Predictions and advice."""
    world = len(situation.machine.devices)
    modes, refused = possible(situation.subject, world) if world > 1 else ([], {})
    singles = [situation.one_rank(device) for device in range(world)]
    one = min(singles, key=lambda found: (bool(found.lacks), found.seconds))
    predictions = sorted([one, *map(situation.predict, modes)], key=lambda found: found.seconds)
    return Findings(situation, tuple(predictions), refused, advise(predictions))


def advise(predictions: list[Prediction]) -> Prediction | None:
    """The fastest that fits; among those as fast one rank before more, exact modes before others, fewer patches."""
    fitting = [found for found in predictions if not found.lacks]
    if not fitting:
        return None
    limit = AS_GOOD * min(found.seconds for found in fitting)
    as_good = [found for found in fitting if found.seconds <= limit]
    return min(as_good, key=lambda f: (f.mode.device is None, not f.mode.exact, f.mode.bands, f.seconds))


def _uneven(situation: Rehearsals) -> bool:
    """Whether the devices' speeds differ by more than noise."""
    totals = [sum(times.values()) for times in situation.block_seconds()]
    return max(totals) > ALIKE * min(totals)
