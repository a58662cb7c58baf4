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

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.devices import device_kind
from parallel_backend.core.host_memory import room_for_weights
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
from .p2p_verdicts import P2PVerdicts
from .pools import Pools
from .prompt_files import PromptFiles
from .remote_transformer import RemoteTransformer

log = logging.getLogger(__name__)

Expected = Callable[[], Request | None]
"""Returns the run for which a model is loaded, or None if it is unknown."""
BORROWED = "Parallel DiT: the ranks were used for something else, and the model is no longer there"


class Registry:
    """Keeps the pools and the models on them. Thread-safe. If a model needs memory, others move to host memory or are
    unloaded, the least recently used first."""

    def __init__(self):
        self.logs: Callable[[], Path | None] = lambda: None
        """Returns the folder for the logs of new ranks, see pool.Pool."""
        self.folder: Callable[[], Path | None] = lambda: None
        """Returns the folder for files that later processes read, see P2PVerdicts. None: nothing is stored."""
        self.threads: int | None = None
        """CPU threads of each new rank, see pool.Pool. None: the cores are divided evenly."""
        self.start_of = start_of
        """Returns the class of new ranks by their devices."""
        self._lock = threading.RLock()  # reentrant: make_room may unload another model on the thread that loads this one
        self._pools = Pools(self._start, P2PVerdicts(lambda: self.folder()), lambda: self.threads)
        self._models = ModelsOnRanks()
        self.use_again = self._models.use_again  # in the place of `model`
        self._files = PromptFiles()
        self._learnt: Learnt = {}
        self._exiting = False
        self._former_owners: list[Any] = []  # kept alive: an owner may be what calls `unload`, and must outlive that call

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
        """Return the model of `setup`. Starts ranks and loads the model if it is not on working ranks, or if its files had
        changed when the prompt began.

        `owner` is kept alive while the model is on ranks, and then until the next use of a model: the object that frees the
        weights must outlive them. `make_room`, `expected()`: for loading, see loading.load_model; other models on the same
        ranks give way after `make_room`. `opened`: see PromptFiles.of. If a device runs out of memory during loading, the
        model is loaded once more and streams more of its weights (memory_guard.py).
        """
        with self._lock:
            entry = self._models.find(setup)
            checkpoint = self._files.of(setup, entry, opened)
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
                entry = self._models.add(setup, model)
            self._models.use(entry, owner)
            self._pools.note(entry.model.pool)
            self._former_owners.clear()
            return entry.model

    def checkpoint(self, prompt: str | None, setup: Setup, opened: Checkpoint) -> Checkpoint:
        """Return the files of `setup` with which this prompt computes, see PromptFiles. `opened`: as a node opened them."""
        with self._lock:
            self._files.begin(prompt)
            return self._files.of(setup, self._models.find(setup), opened)

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
        while len(present := list(self._models)) >= MOST_MODELS:
            self._unload(present[0], poll)

        def load(pool: SomeRanks) -> RemoteTransformer:
            ask = functools.partial(self._make_room, setup, pool, make_room)
            return load_model(
                pool, checkpoint, setup, poll, progress, ask, expected(), keep_others=True, learnt=self._learnt
            )

        try:
            return self._pools.use(setup.devices, load)
        except ValueError:  # refused before anything was sent to the ranks
            raise
        except BaseException:  # such as Cancel: half-loaded ranks are of no use
            self._pools.end(setup.devices, politely=False)
            raise

    def _make_room(self, setup: Setup, pool: SomeRanks, make_room: MakeRoom, device: str, missing: int) -> int:
        """A MakeRoom for the model of `setup`: calls `make_room` for GPUs, then frees memory of other models on `pool`."""
        freed = make_room(device, missing) if device_kind(device) == "cuda" else 0
        with self._lock:
            models, asking = self._models.that_give_way_to(setup, pool), self._models.find(setup)
            return freed + self._make_way(models, device, missing - freed, asking, in_turns=True)

    def make_way(self, pool: SomeRanks, device: str, nbytes: int) -> int:
        """Free `nbytes` of one device by moving the models on these ranks, without waiting. Returns the bytes that become
        free."""
        with self._lock:
            return self._make_way(self._models.of(pool), device, nbytes)

    def held_on(self, pool: SomeRanks, device: str) -> int:
        """Return the bytes of all models on these ranks on one device."""
        with self._lock:
            return sum(each.model.bytes_on(device) for each in self._models.of(pool))

    def _make_way(
        self, models: list[OnRanks], device: str, nbytes: int, asking: OnRanks | None = None, in_turns: bool = False
    ) -> int:
        """As `make_way`, with these models in this order. `asking`: the model that needs the memory, if it is on ranks.
        `in_turns`: models that are used in turns with it in this run keep the least weights that they need to compute."""
        freed = 0
        for each in models:
            held, wanted = each.model.bytes_on(device), nbytes - freed
            if wanted <= 0:
                break
            if not held:
                continue
            working = in_turns and each.run == self._models.run
            to_host = min(held, wanted, each.model.host_lacks)
            has_room = self._host_has_room(device_kind(device), to_host, asking)
            moved = each.model.make_way(device, wanted, working) if has_room else None
            if moved is None:
                self._let_go(each)
                moved = held
            freed += moved
        return freed

    def _host_has_room(self, kind: str, nbytes: int, asking: OnRanks | None) -> bool:
        """Whether `nbytes` of weights fit into host memory, from ranks on this kind of device. To make room, models whose
        weights are only in host memory are unloaded, the least recently used first, except `asking`, which is about to come
        back."""
        if not nbytes:
            return True
        free = room_for_weights(torch.device(kind))
        for each in self._models:
            if free < nbytes and each.model.is_parked and each is not asking:
                free += sum(each.model.resident.host_bytes)
                self._let_go(each)
        return free >= nbytes

    def planned(self, setup: Setup) -> Setup | None:
        """Setup of a model on ranks that differs from `setup` only in the planner's choices. None: there is none."""
        same = [each.setup for each in self._models if setup.differs_by_plan_alone(each.setup)]
        return same[-1] if same else None

    def begin_run(self) -> None:
        """Begin a sampling run, see RemoteTransformer.begin_timeline."""
        with self._lock:
            self._models.run += 1
            for each in self._models:
                with contextlib.suppress(RankError):  # the model's next use starts new ranks
                    each.model.begin_timeline()

    def unload(self, setup: Setup | None = None, poll: Poll = lambda: None) -> None:
        """Free the ranks' memory of the model of `setup`, or of everything if `setup` is None. The ranks stay. Returns when
        the memory is free. Micro-steps in progress finish first. An exception of `poll` only ends the waiting."""
        with self._lock:
            if setup is not None:
                if (entry := self._models.find(setup)) is not None:
                    self._unload(entry, poll)
                return
            for each in self._models:
                self._let_go(each)
            for pool in self._pools.working:
                self._free(pool, poll)

    def _unload(self, gone: OnRanks, poll: Poll) -> None:
        """Free the ranks' memory of one model. If it is the last one on its ranks, free everything, also a VAE's part."""
        pool, freed = gone.model.pool.whole, self._let_go(gone)
        if freed is not None or not self._models.of(pool):
            self._free(pool, poll, freed if self._models.of(pool) else None)

    def _let_go(self, gone: OnRanks) -> Future | None:
        """As `_unload`, but only this model. The future ends when the memory is free. None: the ranks have failed."""
        self._models.remove(gone)
        self._former_owners.append(gone.owner)
        try:
            return gone.model.unload()
        except RankError:
            return None

    def _free(self, pool: Pool, poll: Poll, freed: Future | None = None) -> None:
        """Wait for `freed`. None: have these ranks free everything. Drops failed ranks, whose memory is free already."""
        try:
            wait_for(freed or pool.ask(m.Unload(), m.Unloaded), poll)
        except RankError as error:
            log.warning("%s", str(error))  # as text: a kept record would keep the traceback's frames
            self._pools.end(pool.devices)

    def give_back(self, setup: Setup, device: str, nbytes: float) -> int:
        """Free `nbytes` of `device` by moving the model of `setup`, see RemoteTransformer.give_way. Returns the bytes that
        came free. The model stays on the ranks. Waits for micro-steps in progress."""
        with self._lock:
            model = self._model_of(setup)
            if model is None or model.pool.error is not None:
                return 0
            try:
                return model.give_way(device, nbytes, lambda: None)
            except RankError as error:  # the ranks' memory is free, but is not counted
                log.warning("%s", str(error))
                return 0

    def _model_of(self, setup: Setup) -> RemoteTransformer | None:
        """Return the model of `setup`, or None if it is not on ranks."""
        return None if (entry := self._models.find(setup)) is None else entry.model

    def overview(self) -> list[dict[str, Any]]:
        """Return an overview of each pool for the user, as JSON values. Never waits."""
        return [overview_of(pool, self._models.of(pool)) for pool in self._pools.all]

    def runs_on(self, devices: tuple[str, ...]) -> bool:
        """Whether there are working ranks on these devices. Never waits."""
        return self._pools.serves(devices)

    def bytes_on(self, setup: Setup, device: str) -> int:
        """Return the bytes of the model of `setup` on one device ('cuda:0'). 0 if it is not loaded. Never waits."""
        model = self._model_of(setup)
        return 0 if model is None else model.bytes_on(device)

    def wanted_on(self, setup: Setup, device: str) -> int | None:
        """As `bytes_on`, but as if no other model needed the memory. None: the model is not loaded."""
        model = self._model_of(setup)
        return None if model is None else model.wanted_on(device)

    def begin(self, devices: tuple[str, ...]) -> None:
        """Begin to start ranks on these devices for a later use, unless there are ranks on any of them. Never waits. Does
        nothing while another thread loads a model, because that model needs the devices first."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._exiting:
                    self._pools.begin(devices)
            finally:
                self._lock.release()

    def pool_for(self, devices: tuple[str, ...] | None, poll: Poll, alone: bool = False) -> SomeRanks | None:
        """Return the ranks on these devices, started if necessary. `devices` None: the ranks used last, or None. `alone`:
        see Pools.use."""
        with self._lock:
            if devices is not None:
                return self._pools.use(devices, lambda pool: _ready(pool, poll), alone)
            self._pools.end_failed()
            return None if (pool := self._pools.used_last) is None else _ready(pool, poll)

    @property
    def pool(self) -> Pool | None:
        """The pool used last, or None. Never waits."""
        working = self._pools.working
        return working[-1] if working else None

    def present(self) -> RemoteTransformer | None:
        """Return the model used last, or None if there is none or its ranks have failed. Loads and starts nothing."""
        models = list(self._models)
        return models[-1].model if models else None

    @contextlib.contextmanager
    def borrow(self, devices: tuple[str, ...], poll: Poll = lambda: None) -> Iterator[Pool]:
        """Context with a pool on exactly these devices, started if necessary, for other purposes than sampling. Its models
        are unloaded. An exception in the context ends the ranks, because their state is then unknown."""
        try:
            with self._lock:
                pool = self._pools.use(devices, lambda pool: _ready(pool, poll), alone=True).whole
                pool.clear(RuntimeError(BORROWED))
            yield pool
            pool.clear(RuntimeError(BORROWED))
        except BaseException:
            with self._lock:
                self._pools.end(devices, politely=False)
            raise

    def close(self) -> None:
        """End all ranks."""
        with self._lock:
            self._models.clear()
            self._pools.close()

    def exit(self) -> None:
        """End all ranks, because the process is about to end. No new ranks start afterwards. Never waits for a load in
        progress on another thread; its ranks are killed. A forked process leaves its parent's ranks alone."""
        self._exiting = True
        idle = self._lock.acquire(blocking=False)
        try:
            self._pools.end_all(politely=idle)
        finally:
            if idle:
                self._lock.release()

    def _start(self, devices: tuple[str, ...], self_test: SelfTest) -> Pool:
        threads = self._pools.threads(devices) if self.threads is None else self.threads
        if self._exiting:
            raise RankError("Parallel DiT: ComfyUI is closing and starts no more ranks")
        return Pool(devices, threads=threads, start=self.start_of(devices), logs=self.logs(), self_test=self_test)


def _ready(pool: SomeRanks, poll: Poll) -> SomeRanks:
    wait_for(pool.ready, poll)
    return pool


@functools.cache
def registry() -> Registry:
    """Return the process's registry, whose ranks end with the process."""
    one = Registry()
    atexit.register(one.exit)
    return one
