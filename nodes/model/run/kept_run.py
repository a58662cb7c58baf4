"""A sampling run that survives its ranks: the failed call is made again on the remaining devices. ComfyUI's process has the
sampler's state, so a lost rank costs the calls that were in progress and a load."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.lost_ranks import degrees_left, devices_left
from parallel_backend.client.pipefusion.banded_run import BandedRun
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.planning.trials import Trials
from parallel_backend.processes.pool import DeviceFull, RankLost

from .long_step import LongStep
from .sampling_run import NO_CALL, SamplingRun

T = TypeVar("T")
Load = Callable[[], RemoteTransformer]


class Stub(Protocol):
    """The attributes of RemoteDiffusionModel that a lost rank changes."""

    checkpoint: Checkpoint
    setup: Setup
    run: SamplingRun


def kept(stub: Stub, load: Load, work: Callable[[RemoteTransformer], T]) -> T:
    """`work(load())`. If the run goes on after the model's ranks are lost, both are called again. Raises other errors."""
    while True:
        model = None
        try:
            model = load()
            return work(model)
        except (DeviceFull, RankLost) as error:
            if not _goes_on(stub, model, error):
                raise


@dataclass
class KeptBands:
    """A poll for a run in bands, on ComfyUI's thread: provides new ranks if the run's are lost. Otherwise it does the same
    as LongStep."""

    stub: Stub
    run: BandedRun
    load: Load

    def __post_init__(self) -> None:
        self._poll = LongStep(self.run.model, first=True)

    def __call__(self) -> None:
        while (error := self.run.lost) is not None:
            if not _goes_on(self.stub, self.run.model, error):
                raise error
            model, cache = kept(self.stub, self.load, lambda model: model), self.stub.run.cache
            if cache is not None:
                cache.restart(len(self.run.rows))
            self.run.go_on(model, None if cache is None else cache.cache, self._poll)
            self._poll = LongStep(model, first=True)
        if self.run.model.answered:
            self.stub.run.tell_again()
        self._poll()


def end(stub: Stub) -> None:
    """The run has ended: the next one begins with the previous devices and degrees."""
    stub.run.call, before = NO_CALL, stub.run.before  # its options have the run in bands, and that has the model
    if before is not None:
        plan = {name: getattr(before, name) for name in ("devices", "degrees", "stage_split", "planned")}
        stub.setup, stub.run.before = replace(stub.setup, **plan), None


def _goes_on(stub: Stub, model: RemoteTransformer | None, error: DeviceFull | RankLost) -> bool:
    """Whether to repeat the call that ended with `error`. `model`: see FurtherTries.allows."""
    run, streams_more = stub.run, ""
    if isinstance(error, DeviceFull) and model is not None:
        streams_more = model.learn(error)  # in any case: the next prompt goes by it
    if not stub.setup.keep_run:
        return False

    def next_try() -> str:
        line = _on_devices_left(stub, error) if isinstance(error, RankLost) else streams_more
        if line:
            run.lost()
        return line

    return run.tries.allows(model, next_try)


def _on_devices_left(stub: Stub, error: RankLost) -> str:
    """Give `stub` the setup for the remaining devices. Returns the line for the user."""
    setup = stub.setup
    left = devices_left(setup.devices, [name.partition(" on ")[0] for name in error.devices])
    if len(left) < len(setup.devices):
        degrees = degrees_left(setup.degrees, len(left), lambda each: _is_possible(stub, each))
        left = left[: degrees.world]
        split = setup.stage_split if degrees.pipe == setup.degrees.pipe else "auto"
        stub.run.before = stub.run.before or setup
        stub.setup = replace(setup, devices=left, degrees=degrees, stage_split=split, planned="")
    who = " and ".join(error.devices) or "the ranks"
    return f"{who} {error.did} in {stub.run.step}. The run goes on with {', '.join(left)}"


def _is_possible(stub: Stub, degrees: Degrees) -> bool:
    """Whether the model's class is proven for these degrees, without another trial, and can be cut by them."""
    proof = stub.run.proof
    if proof is None:
        return degrees.world == 1
    tensor = (stub.run.before or stub.setup).degrees.tensor
    if Trials(stub.setup.own_class, {1: proof, tensor: proof}).lacks(degrees):
        return False
    try:
        stub.checkpoint.check_degrees(degrees)
    except ValueError:
        return False
    return True
