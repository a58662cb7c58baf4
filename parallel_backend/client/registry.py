"""The process's ranks and the models on them, shared by all nodes.

ComfyUI may cache or drop node outputs at any time, and ranks must not depend on that. So the registry keeps one pool of
ranks for a set of devices, with as many models as there is memory for.
"""

import atexit
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_setup, with_class
from parallel_backend.core.setup import Setup
from parallel_backend.placement.memory_model import Request
from parallel_backend.processes.pool import LoadProgress, Poll, Pool, RankError, wait_for
from parallel_backend.processes.pool_part import SomeRanks
from parallel_backend.processes.ray_ranks import start_of
from parallel_backend.wire import messages as m
from parallel_backend.wire.rank_settings import SelfTest

from .loading import NoRoomToLoad, load_model
from .memory_guard import Learnt, MakeRoom, no_room
from .models_on_ranks import MOST_MODELS, ModelsOnRanks, OnRanks
from .overview import overview_of
from .pools import Pools
from .remote_transformer import RemoteTransformer
from .transports import KeptTransports

log = logging.getLogger(__name__)

Expected = Callable[[], Request | None]
"""Returns the run for which a model is loaded, or None if it is unknown."""
BORROWED = "Parallel DiT: the ranks were used for something else, and the model is no longer there"


class Registry:
    """Keeps the pools and the models on them. Thread-safe. If a model needs memory, others move to host memory or are
    unloaded, the least recently used first."""

    def __init__(self):
        self.folder: Callable[[], Path | None] = lambda: None
        """Returns the folder for files that later processes read, see KeptTransports, and for the ranks' logs. None: nothing
        is stored."""
        self.threads: int | None = None
        """CPU threads of each new rank, see pool.Pool. None: the cores are divided evenly."""
        self.start_of = start_of
        """Returns the class of new ranks by their devices."""
        self._lock = threading.RLock()  # reentrant: make_room may unload another model on the thread that loads this one
        self.pools = Pools(self._start, KeptTransports(lambda: self.folder()), lambda: self.threads)
        """The pools of ranks. Changed under the registry's lock, read without it."""
        self.models = ModelsOnRanks(self._lock)
        """The models on the ranks, and what frees their memory for others."""
        self._learnt: Learnt = {}
        self._exiting = False

    def model(
        self,
        setup: Setup,
        poll: Poll,
        progress: LoadProgress = lambda doing, fraction: None,
        owner: Any = None,
        make_room: MakeRoom = no_room,
        expected: Expected = lambda: None,
        opened: Checkpoint | None = None,
    ) -> RemoteTransformer:
        """Return the model of `setup`. Starts ranks and loads the model if it is not on working ranks, or if its file has
        changed.

        `owner` is kept alive while the model is on ranks, and then until the next use of a model: the object that frees the
        weights must outlive them. `make_room`, `expected()`: for loading, see loading.load_model; other models on the same
        ranks free memory after `make_room`. `opened`: the file. None: the file as it is now. If a device runs out of memory
        during loading, the model is loaded once more and streams more of its weights (memory_guard.py).
        """
        with self._lock:
            entry = self.models.find(setup)
            known = None if entry is None or entry.model.checkpoint.has_changed else entry.model.checkpoint
            checkpoint = opened or known or open_setup(setup)
            if checkpoint.built.own != setup.own_class:  # more of its calls has been proven since
                checkpoint = with_class(checkpoint, setup.own_class)
            if entry is not None and entry.model.checkpoint.file_state != checkpoint.file_state:
                log.info("Parallel DiT: %s has changed on disk and is read again", setup.path.name)
                self._unload(entry, poll)
                entry = None
            if entry is None:
                load = functools.partial(self._load, checkpoint, setup, poll, progress, make_room, expected)
                try:
                    model = load()
                except NoRoomToLoad as error:
                    if not error.next_try:
                        raise
                    log.warning("Parallel DiT: %s", error.next_try)
                    progress(error.next_try, 0.0)
                    model = load()
                entry = self.models.add(setup, model)
            self.models.use(entry, owner)
            self.pools.note(entry.model.pool)
            return entry.model

    def _load(
        self,
        checkpoint: Checkpoint,
        setup: Setup,
        poll: Poll,
        progress: LoadProgress,
        make_room: MakeRoom,
        expected: Expected,
    ) -> RemoteTransformer:
        checkpoint.check_unchanged()
        while len(present := list(self.models)) >= MOST_MODELS:
            self._unload(present[0], poll)

        def load(pool: SomeRanks) -> RemoteTransformer:
            ask = functools.partial(self.models.make_room, setup, pool, make_room)
            return load_model(
                pool, checkpoint, setup, poll, progress, ask, expected(), keep_others=True, learnt=self._learnt
            )

        try:
            return self.pools.use(setup.devices, load)
        except ValueError:  # refused before anything was sent to the ranks
            raise
        except BaseException:  # such as Cancel: half-loaded ranks are of no use
            self.pools.end(setup.devices, politely=False)
            raise

    def planned(self, setup: Setup) -> Setup | None:
        """Setup of a model on ranks that differs from `setup` only in the planner's choices. None: there is none."""
        same = [each.setup for each in self.models if setup.differs_by_plan_alone(each.setup)]
        return same[-1] if same else None

    def begin_run(self) -> None:
        """Begin a sampling run, see RemoteTransformer.begin_timeline."""
        with self._lock:
            self.models.run += 1
            for each in self.models:
                with contextlib.suppress(RankError):  # the model's next use starts new ranks
                    each.model.begin_timeline()

    def unload(self, setup: Setup | None = None, poll: Poll = lambda: None) -> None:
        """Free the ranks' memory of the model of `setup`, or of everything if `setup` is None. The ranks stay. Returns when
        the memory is free. Micro-steps in progress finish first. An exception of `poll` only ends the waiting."""
        with self._lock:
            if setup is not None:
                if (entry := self.models.find(setup)) is not None:
                    self._unload(entry, poll)
                return
            for each in self.models:
                self.models.let_go(each)
            for pool in self.pools.working:
                self._free(pool, poll)

    def _unload(self, gone: OnRanks, poll: Poll) -> None:
        """Free the ranks' memory of one model; with the last one on them everything, a VAE's part too."""
        pool, freed = gone.model.pool.whole, self.models.let_go(gone)
        if freed is not None or not self.models.of(pool):
            self._free(pool, poll, freed if self.models.of(pool) else None)

    def _free(self, pool: Pool, poll: Poll, freed: Future | None = None) -> None:
        """Wait until the pool's ranks have freed memory. `freed`: the request to wait for. None: ask them to free
        everything. If they have failed, the pool ends; their memory is free already."""
        try:
            wait_for(freed or pool.ask(m.Unload(), m.Unloaded), poll)
        except RankError as error:
            log.warning("%s", str(error))  # as text: a kept record would keep the traceback's frames
            self.pools.end(pool.devices)

    def overview(self) -> list[dict[str, Any]]:
        """Return an overview of each pool for the user, as JSON values. Never waits."""
        return [overview_of(pool, self.models.of(pool)) for pool in self.pools.all]

    def begin(self, devices: tuple[str, ...]) -> None:
        """Begin to start ranks on these devices for a later use, unless there are ranks on any of them. Never waits. Does
        nothing while another thread loads a model, because that model needs the devices first."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._exiting:
                    self.pools.begin(devices)
            finally:
                self._lock.release()

    def pool_for(self, devices: tuple[str, ...] | None, poll: Poll, alone: bool = False) -> SomeRanks | None:
        """Return the ranks on these devices, started if necessary. `devices` None: the ranks used last, or None. `alone`:
        see Pools.use."""
        with self._lock:
            if devices is not None:
                return self.pools.use(devices, lambda pool: _ready(pool, poll), alone)
            self.pools.end_failed()
            return None if (pool := self.pools.used_last) is None else _ready(pool, poll)

    def present(self) -> RemoteTransformer | None:
        """Return the model used last, or None if there is none or its ranks have failed. Loads and starts nothing."""
        models = list(self.models)
        return models[-1].model if models else None

    @contextlib.contextmanager
    def borrow(self, devices: tuple[str, ...], poll: Poll = lambda: None) -> Iterator[Pool]:
        """Context with a pool on exactly these devices, started if necessary, for other purposes than sampling. Its models
        are unloaded. An exception in the context ends the ranks, because their state is then unknown."""
        try:
            with self._lock:
                pool = self.pools.use(devices, lambda pool: _ready(pool, poll), alone=True).whole
                pool.clear(RuntimeError(BORROWED))
            yield pool
            pool.clear(RuntimeError(BORROWED))
        except BaseException:
            with self._lock:
                self.pools.end(devices, politely=False)
            raise

    def close(self) -> None:
        """End all ranks."""
        with self._lock:
            self.models.clear()
            self.pools.close()

    def exit(self) -> None:
        """End all ranks, because the process is about to end. No new ranks start afterwards. Never waits for a load in
        progress on another thread; its ranks are killed. A forked process leaves its parent's ranks alone."""
        self._exiting = True
        idle = self._lock.acquire(blocking=False)
        try:
            self.pools.end_all(politely=idle)
        finally:
            if idle:
                self._lock.release()

    def _start(self, devices: tuple[str, ...], self_test: SelfTest) -> Pool:
        threads = self.pools.threads(devices) if self.threads is None else self.threads
        if self._exiting:
            raise RankError("Parallel DiT: ComfyUI is closing and starts no more ranks")
        folder = self.folder()
        logs = None if folder is None else folder / "logs"
        return Pool(devices, threads=threads, start=self.start_of(devices), logs=logs, self_test=self_test)


def _ready(pool: SomeRanks, poll: Poll) -> SomeRanks:
    wait_for(pool.ready, poll)
    return pool


@functools.cache
def registry() -> Registry:
    """Return the process's registry, whose ranks end with the process."""
    one = Registry()
    atexit.register(one.exit)
    return one
