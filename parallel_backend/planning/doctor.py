"""The examination of Parallel Doctor: measure the machine, rehearse every mode, plan from both."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.measurements import measured_links
from parallel_backend.core.setup import ALLOWED, Offload
from parallel_backend.placement.links import SIZES
from parallel_backend.processes.pool import Poll, Pool, wait_for
from parallel_backend.wire.diagnosis import DeviceMemoryReport, ReadMemory
from parallel_backend.wire.lifecycle import Unload, Unloaded

from .machine import machine_of
from .modes import Mode, possible
from .planner import Plan, plan
from .rehearsal import rehearse
from .rehearsed_costs import RehearsedCosts, needed
from .workload import Workload

HostFree = Callable[[], int | None]
"""Free bytes of the host's memory. None: not known."""
Progress = Callable[[int, int], None]
"""(rehearsals done, all rehearsals)."""


def examine(
    pool: Pool,
    checkpoint: Checkpoint,
    workload: Workload,
    attention: str,
    host_free: HostFree,
    poll: Poll,
    progress: Progress = lambda _done, _total: None,
    offload: Offload = ALLOWED,
) -> Plan:
    """The ranks lose their model. RankError if a rank fails, for instance for lack of memory."""
    world = len(pool.devices)
    modes = possible(workload, world)[0] if world > 1 else []
    costs = measure(pool, checkpoint, workload, modes, attention, host_free, poll, progress)
    return plan(costs, offload=offload)


def measure(
    pool: Pool,
    checkpoint: Checkpoint,
    workload: Workload,
    modes: list[Mode],
    attention: str,
    host_free: HostFree,
    poll: Poll,
    progress: Progress = lambda _done, _total: None,
) -> RehearsedCosts:
    """The costs of these modes, and of one device. `host_free` is called once the ranks have no model."""
    wait_for(pool.ready, poll)
    links = measured_links(pool, SIZES, poll)
    memories = wait_for(pool.ask(ReadMemory(), DeviceMemoryReport), poll)
    costs = RehearsedCosts(workload, machine_of(pool.devices, links, memories, host_free()), {})
    groups = [list(same) for _, same in itertools.groupby(needed(modes, workload), key=lambda kind: kind.degrees)]
    # CPU ranks share the machine with other programs. Each group is timed twice, in mirrored order, so that a slow phase of
    # the machine does not fall on one mode alone.
    groups += groups[::-1] if costs.machine.on_cpus else []
    total, done = 1 + sum(map(len, groups)), itertools.count(1)

    def advance() -> None:
        progress(next(done), total)

    advance()
    for kinds in groups:
        uneven = kinds[0].degrees.patch > 1 and costs.uneven
        rehearsed = dict(costs.rehearsed)
        for kind, call in rehearse(pool, checkpoint, workload, kinds, attention, uneven, poll, advance).items():
            rehearsed[kind] = rehearsed[kind].quicker(call) if kind in rehearsed else call
        costs = replace(costs, rehearsed=rehearsed)
    wait_for(pool.ask(Unload(), Unloaded), poll)
    return costs
