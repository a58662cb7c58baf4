"""The process's ranks and the models on them, shared by all nodes.

ComfyUI caches node outputs and drops them as it likes. Ranks must neither end nor multiply with them: there is one pool of
ranks for a set of devices, and on it as many models as there is room for.
"""

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.devices import device_kind
from parallel_backend.core.host_memory import LEFT_FREE, host_memory
from parallel_backend.core.setup import Setup
from parallel_backend.placement.memory_model import Request
from parallel_backend.processes.pool import LoadProgress, Poll, Pool, RankError, wait_for
from parallel_backend.processes.ray_ranks import start_of
from parallel_backend.wire import messages as m
from parallel_backend.wire.rank_settings import SelfTest

from .loading import load_model
from .memory_guard import MakeRoom, no_room
from .models_on_ranks import MOST_MODELS, ModelsOnRanks, OnRanks
from .pools import Pools
from .remote_transformer import RemoteTransformer

log = logging.getLogger(__name__)

BORROWED = "Parallel DiT: the ranks have been used for something else, and the model is not there any more"


class Registry:
    """Keeps the pools and the models on them. Thread-safe.

    Models give way to each other, the least recently used first: they leave the devices for host memory, and the ranks where
    the host has no room either.
    """

    def __init__(self):
        self.logs: Callable[[], Path | None] = lambda: None
        """Folder in which logs of ranks to be started are kept, see pool.Pool. None: nowhere."""
        self.threads: int | None = None
        """CPU threads of each rank to be started, see pool.Pool. None: the cores are shared out."""
        self.start_of = start_of
        """Where ranks on these devices are started, see pool.Pool."""
        self._lock = threading.RLock()  # make_room may unload another model, on the thread that loads this one
        self._pools = Pools(self._start)
        self._models = ModelsOnRanks()
        self._former_owners: list[Any] = []  # never read: who unloads may be one of them, and need itself to the end

    def model(
        self,
        setup: Setup,
        poll: Poll,
        progress: LoadProgress = lambda doing, fraction: None,
        owner: Any = None,
        make_room: MakeRoom = no_room,
        expected: Callable[[], Request | None] = lambda: None,
    ) -> RemoteTransformer:
        """The model of `setup`. Ranks are started and the model is loaded if that is not done yet, or ranks have failed, or
        its files have changed since.

        `owner` is kept alive as long as the model is on ranks, and until the next use of one, or its own by another owner:
        the object that frees the weights must outlive them. `make_room`, `expected()`: for loading, see loading.load_model;
        other models on the same ranks give way after `make_room`. A loaded model stays as it is, whatever size is expected.
        """
        with self._lock:
            found = self._models.find(setup)
            if found is not None and not found.model.checkpoint.is_unchanged:
                log.info("Parallel DiT: %s has changed on disk and is read again", setup.path.name)
                self._unload(found, poll)
                found = None
            if found is None:
                found = self._models.add(setup, self._load(setup, poll, progress, make_room, expected))
            self._models.use(found, owner)
            self._former_owners.clear()
            return found.model

    def _load(
        self,
        setup: Setup,
        poll: Poll,
        progress: LoadProgress,
        make_room: MakeRoom,
        expected: Callable[[], Request | None],
    ) -> RemoteTransformer:
        checkpoint = open_checkpoint(setup.path)
        while len(present := list(self._models)) >= MOST_MODELS:
            self._unload(present[0], poll)

        def load(pool: Pool) -> RemoteTransformer:
            def ask(device: str, missing: int) -> int:
                return self._make_room(setup, pool, make_room, device, missing)

            return load_model(pool, checkpoint, setup, poll, progress, make_room=ask, expected=expected(), keep_others=True)

        try:
            return self._pools.use(setup.devices, load)
        except ValueError:  # refused before the ranks were asked for anything
            raise
        except BaseException:  # Cancel too: half-loaded ranks are useless
            self._pools.end(setup.devices, politely=False)
            raise

    def _make_room(self, setup: Setup, pool: Pool, make_room: MakeRoom, device: str, missing: int) -> int:
        """A MakeRoom for the model of `setup`: asks `make_room` on GPUs, then the other models on its ranks."""
        freed = make_room(device, missing) if device_kind(device) == "cuda" else 0
        with self._lock:
            models, asking = self._models.that_give_way_to(setup, pool), self._models.find(setup)
            return freed + self._make_way(models, device, missing - freed, asking, in_turns=True)

    def make_way(self, pool: Pool, device: str, nbytes: int) -> int:
        """Have the models on these ranks hand over so many bytes of one device's memory. Bytes that come free; ranks do it
        before what they are sent from now on."""
        with self._lock:
            return self._make_way(self._models.of(pool), device, nbytes)

    def held_on(self, pool: Pool, device: str) -> int:
        """Bytes that the models on these ranks have on one device."""
        with self._lock:
            return sum(each.model.bytes_on(device) for each in self._models.of(pool))

    def _make_way(
        self, models: list[OnRanks], device: str, nbytes: int, asking: OnRanks | None = None, in_turns: bool = False
    ) -> int:
        """As `make_way`, of these models in this order. `asking`: the model that needs the room, if it is on ranks already.
        `in_turns`: for one more model, beside which those that are used in this run go on."""
        freed = 0
        for each in models:
            held, wanted = each.model.bytes_on(device), nbytes - freed
            if wanted <= 0:
                break
            if not held:
                continue
            working = in_turns and each.run == self._models.run
            to_host = min(held, wanted, each.model.host_lacks)
            given = each.model.make_way(device, wanted, working) if self._host_has_room(to_host, asking) else None
            if given is None:
                self._let_go(each)
                given = held
            freed += given
        return freed

    def _host_has_room(self, nbytes: int, asking: OnRanks | None) -> bool:
        """Whether so many bytes of weights can go to this machine's memory. Models that are there alone are unloaded first,
        the least recently used one first, but for the one that is `asking`: it comes back from there."""
        if not nbytes:
            return True
        free = host_memory()[0] - LEFT_FREE
        for each in self._models:
            if free < nbytes and each.model.is_parked and each is not asking:
                free += sum(each.model.resident.host_bytes)
                self._let_go(each)
        return free >= nbytes

    def planned(self, setup: Setup) -> Setup | None:
        """Key of a model on ranks that differs from `setup` in nothing but what the planner chose. None: there is none."""
        same = [each.setup for each in self._models if setup.differs_by_plan_alone(each.setup)]
        return same[-1] if same else None

    def begin_run(self) -> None:
        """A sampling run begins: see RemoteTransformer.begin_timeline."""
        with self._lock:
            self._models.run += 1
            for each in self._models:
                with contextlib.suppress(RankError):  # the next use starts new ranks
                    each.model.begin_timeline()

    def unload(self, setup: Setup | None = None, poll: Poll = lambda: None) -> None:
        """Free what the ranks hold of the model of `setup`, or all that they hold if `setup` is None. The ranks stay.

        Returns when the memory is free. Micro-steps under way finish first. What `poll` raises ends the waiting alone.
        """
        with self._lock:
            if setup is not None:
                if (found := self._models.find(setup)) is not None:
                    self._unload(found, poll)
                return
            for each in self._models:
                self._let_go(each)
            freeing = [(pool, self._begin_freeing(pool)) for pool in self._pools.working]
            for pool, freed in freeing:
                self._finish_freeing(pool, freed, poll)

    def _unload(self, gone: OnRanks, poll: Poll) -> None:
        """Free what the ranks hold of one model; of the last one on them all that they hold, a VAE's coder too."""
        pool = gone.model.pool
        try:
            if (freed := self._let_go(gone)) is not None and self._models.of(pool):
                wait_for(freed, poll)
        except RankError as error:
            self._end_failed(pool, error)
        else:
            if not self._models.of(pool):
                self._finish_freeing(pool, self._begin_freeing(pool), poll)

    def _let_go(self, gone: OnRanks) -> Future | None:
        """As `_unload`, of this model alone and without waiting. The future ends when the memory is free; None: the ranks
        have failed."""
        self._models.remove(gone)
        self._former_owners.append(gone.owner)
        try:
            return gone.model.unload()
        except RankError:
            return None

    def _begin_freeing(self, pool: Pool) -> Future | None:
        """Have these ranks free all that they hold. The future ends when they have; None: they have failed."""
        try:
            return pool.ask(m.Unload(), m.Unloaded)
        except RankError as error:
            self._end_failed(pool, error)
            return None

    def _finish_freeing(self, pool: Pool, freed: Future | None, poll: Poll) -> None:
        try:
            if freed is not None:
                wait_for(freed, poll)
        except RankError as error:
            self._end_failed(pool, error)

    def _end_failed(self, pool: Pool, error: RankError) -> None:
        """The memory is free, and the next use starts new ranks."""
        log.warning("%s", str(error))  # as text: a kept record would keep the traceback's frames
        self._pools.end(pool.devices)

    def give_back(self, setup: Setup, device: str, nbytes: float) -> int:
        """Have the ranks on `device` hand over so many bytes of its memory, see giving_way.give_way. Bytes that came free.

        Their model, which is that of `setup`, stays. Waits for micro-steps that are under way.
        """
        with self._lock:
            model = self._model_of(setup)
            if model is None or model.pool.error is not None:
                return 0
            try:
                return model.give_way(device, nbytes, lambda: None)
            except RankError as error:  # its memory is free too, which nobody counts here
                log.warning("%s", str(error))
                return 0

    def _model_of(self, setup: Setup) -> RemoteTransformer | None:
        """The model of `setup`, if it is on ranks."""
        found = self._models.find(setup)
        return None if found is None else found.model

    def runs_on(self, devices: tuple[str, ...]) -> bool:
        """There are working ranks on just these devices. Never waits."""
        return any(pool.devices == devices for pool in self._pools.working)

    def bytes_on(self, setup: Setup, device: str) -> int:
        """Bytes that ranks hold of the model of `setup` on one device ('cuda:0'). 0 if it is not loaded. Never waits."""
        model = self._model_of(setup)
        return 0 if model is None else model.bytes_on(device)

    def wanted_on(self, setup: Setup, device: str) -> int | None:
        """Bytes that ranks hold of the model of `setup` on one device if nobody needs room. None: it is not loaded."""
        model = self._model_of(setup)
        return None if model is None else model.wanted_on(device)

    def pool_for(self, devices: tuple[str, ...] | None, poll: Poll) -> Pool | None:
        """The ranks on these devices, started if they do not run. `devices` None: the ranks used last, or None."""
        with self._lock:
            if devices is not None:
                return self._pools.use(devices, lambda pool: _ready(pool, poll))
            self._pools.end_failed()
            return None if (pool := self.pool) is None else _ready(pool, poll)

    @property
    def pool(self) -> Pool | None:
        """The ranks used last, or None. Never waits."""
        working = self._pools.working
        return working[-1] if working else None

    def present(self) -> RemoteTransformer | None:
        """The model used last, or None if there is none or its ranks have failed. Loads and starts nothing."""
        models = list(self._models)
        return models[-1].model if models else None

    @contextlib.contextmanager
    def borrow(self, devices: tuple[str, ...], poll: Poll = lambda: None) -> Iterator[Pool]:
        """Context that has the ranks on these devices for something other than sampling, started if they do not run.

        Their models are gone: the next `model` loads one again. An exception inside ends the ranks, since their state is
        unknown.
        """
        try:
            with self._lock:
                pool = self._pools.use(devices, lambda pool: _ready(pool, poll))
                pool.clear(RuntimeError(BORROWED))
            yield pool
            pool.clear(RuntimeError(BORROWED))
        except BaseException:
            with self._lock:
                self._pools.end(devices, politely=False)
            raise

    def close(self) -> None:
        """End the ranks, which frees everything they hold."""
        with self._lock:
            self._models.clear()
            self._pools.close()

    def _start(self, devices: tuple[str, ...], self_test: SelfTest) -> Pool:
        threads = self.threads
        if threads is None and device_kind(devices[0]) == "cpu":  # with the CPU ranks that are there already
            cpu_devices = [name for pool in self._pools.working for name in pool.devices if device_kind(name) == "cpu"]
            threads = max(1, (os.cpu_count() or 1) // len((*devices, *cpu_devices)))
        return Pool(
            devices,
            threads=threads,
            start=self.start_of(devices),
            logs=self.logs(),
            self_test=self_test,
        )


def _ready(pool: Pool, poll: Poll) -> Pool:
    wait_for(pool.ready, poll)
    return pool


@functools.cache
def registry() -> Registry:
    """The process's registry. Its ranks end with the process."""
    one = Registry()
    atexit.register(one.close)
    return one
