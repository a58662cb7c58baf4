"""Every way to use a machine for a job, ranked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel_backend.client.placement.memory_model import KV_COPIES, Memory, activation_bytes, held_weights, step_tokens
from parallel_backend.core.degrees import AXES, Degrees

from .cost_model import Job, Stages, run_seconds
from .doctor import advise
from .machine import Machine
from .modes import Mode, possible
from .prediction import Prediction, lacking


@dataclass(frozen=True)
class Plan:
    """`predictions`: fastest first, those that do not fit too. `refused`: degrees that cannot be, and why."""

    machine: Machine
    job: Job
    predictions: tuple[Prediction, ...]
    refused: dict[Degrees, str]

    @property
    def best(self) -> Prediction | None:
        """Of all that fit, PipeFusion and displaced patches too, which are approximate; None if nothing fits."""
        return advise(list(self.predictions))

    @property
    def best_exact(self) -> Prediction | None:
        return advise([found for found in self.predictions if found.mode.exact])

    @property
    def one_device(self) -> Prediction:
        return next(found for found in self.predictions if found.mode.device is not None)

    def find(self, mode: Mode) -> Prediction | None:
        return next((found for found in self.predictions if found.mode == mode), None)


def choose(found: Plan) -> Prediction:
    """What `degrees auto` takes: of PipeFusion and exact modes the best that fits, or else the one that needs least memory.

    PipeFusion's are to be had where the sampler pipelines; elsewhere the job's steps are all warm-up, and so exact.
    """
    usable = [each for each in found.predictions if each.mode.degrees.patch == 1]
    least = min(usable, key=lambda each: (max(memory.total for memory in each.memory), each.seconds))
    return advise(usable) or least


def plan(machine: Machine, job: Job, counts: Sequence[int] | None = None) -> Plan:
    """All modes of `counts` devices, the first so many (None: all of them), and of the best single one."""
    predictions, refused = [], {}
    for count in counts or (len(machine.devices),):
        if count == 1:
            continue
        modes, why = possible(job.subject, count)
        predictions += [predict(machine, job, mode) for mode in modes]
        refused |= why
    singles = [predict(machine, job, Mode(Degrees(), device=device)) for device in range(len(machine.devices))]
    predictions.append(min(singles, key=lambda found: (bool(found.lacks), found.seconds)))
    return Plan(machine, job, tuple(sorted(predictions, key=lambda found: found.seconds)), refused)


def predict(machine: Machine, job: Job, mode: Mode) -> Prediction:
    """Seconds, bytes and memory of a run in this mode, and why it does not fit."""
    if mode.device is not None:
        machine = replace(machine, devices=(machine.devices[mode.device],))
    stages = Stages(machine, job, mode)
    ranks = range(mode.degrees.world)
    memory = tuple(_memory(stages, rank) for rank in ranks)
    lacks = lacking(
        {rank: held.total for rank, held in enumerate(memory)},
        machine.names,
        [device.memory for device in machine.devices],
        machine.host_free,
    )
    return Prediction(mode, run_seconds(stages), _step_bytes(stages), memory, lacks)


def _step_bytes(stages: Stages) -> dict[str, tuple[int, ...]]:
    """Mesh axis -> bytes that each rank sends in a step after the warm-up."""
    mode, degrees, subject = stages.mode, stages.degrees, stages.subject
    entries = mode.entries(subject)
    banded = mode.bands > 1 and subject.warm_up_steps < subject.steps
    bands = range(mode.bands) if banded else (None,)
    queries = sum(stages.job.queries(mode.bands, band) for band in bands)
    axes = {}
    for axis in AXES:
        if getattr(degrees, axis) == 1 or axis == "batch":
            continue
        counts = []
        for rank in range(degrees.world):
            at = degrees.coordinate(rank).pipe
            if axis == "pipe":
                last = at == degrees.pipe - 1
                counts.append(0 if last else round(sum(stages.on(at, band, entries) for band in bands)))
            else:
                counts.append(round(len(stages.spans[at]) * stages.sent(axis, queries, entries)))
        axes[axis] = tuple(counts)
    return axes


def _memory(stages: Stages, rank: int) -> Memory:
    mode, degrees, subject = stages.mode, stages.degrees, stages.subject
    stage = degrees.coordinate(rank).pipe
    span = stages.spans[stage]
    weights = held_weights(subject.block_bytes, subject.ends, degrees.tensor, span)
    entries, tokens = mode.entries(subject), stages.job.queries(None, None)
    buffers = 0
    if not mode.exact and subject.warm_up_steps < subject.steps:
        cut = degrees.ulysses * degrees.tensor
        buffers = round(KV_COPIES * 2 * entries * tokens * subject.token_bytes / cut) * len(span)
    most = max(step_tokens(subject.image, stages.job.text, entries, degrees.pipe, mode.bands if buffers else 1))
    activations = activation_bytes(most / degrees.sequence, subject.token_bytes, stages.job.joint)
    return Memory(weights, buffers, activations, buffers // KV_COPIES if degrees.displaced else 0)
