"""Ranks that compute more slowly than the machine: they stand in for unequal devices."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from parallel_backend.processes.local import LocalRanks, Ranks
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.loaded_stage import LoadedStage
from parallel_backend.rank.start.entry import main
from parallel_backend.rank.worker import Worker
from parallel_backend.wire.diagnosis import Probe, Probed
from parallel_backend.wire.loading import Load
from parallel_backend.wire.rank_settings import RankSettings, StartSettings
from parallel_backend.wire.sampling import Output, Step
from parallel_backend.wire.timeline_kinds import WAIT


class SlowEngine(Engine):
    """`slowdown`: 2 makes the rank compute half as fast."""

    def __init__(self, slowdown: float, *arguments: Any):
        self.slowdown = slowdown
        super().__init__(*arguments)

    def step(self, step: Step, upcoming: Step | None) -> Output | None:
        self._began, self._waited_before = self._traffic.clock.now(), self._traffic.recorder.seconds(WAIT)
        return super().step(step, upcoming)

    def _compute(self, step: Step, *prepared: Any) -> torch.Tensor:
        """Then sleep for the rest of the time that the slower device would take."""
        output = super()._compute(step, *prepared)
        whole = self._traffic.clock.now() - self._began
        waited = self._traffic.recorder.seconds(WAIT) - self._waited_before
        time.sleep((self.slowdown - 1) * max(0.0, whole - waited))
        return output


class SlowWorker(Worker):
    """`slowdown`: as SlowEngine's."""

    def __init__(self, slowdown: float, *arguments: Any):
        super().__init__(*arguments)
        self.slowdown = slowdown

    def _engine(self, message: Load, stage: LoadedStage) -> Engine:
        return SlowEngine(self.slowdown, self.settings.rank, message, stage)

    def _probe(self, message: Probe) -> Probed:
        probed = super()._probe(message)
        blocks = {name: self._slower(seconds) for name, seconds in probed.blocks.items()}
        return replace(probed, blocks=blocks, ends=self._slower(probed.ends))

    def _slower(self, seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(self.slowdown * each for each in seconds)


def enter(slowdown: tuple[float, ...], settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main."""
    main(settings, connection, functools.partial(SlowWorker, slowdown[settings.rank]))


def start_with(slowdown: tuple[float, ...]) -> Callable[[StartSettings], Ranks]:
    """The `start` argument of a Pool. `slowdown`: by rank, see SlowEngine."""
    return functools.partial(LocalRanks, entry=functools.partial(enter, slowdown))
