"""The process's ranks and the models on them, shared by all nodes.

ComfyUI caches node outputs and drops them as it likes. Ranks must neither end nor multiply with them: there is one pool of
ranks, with one model, and further ones only on GPUs that are apart.
"""

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import LinksDown, LoadProgress, Poll, Pool, RankError, wait_for
from parallel_backend.processes.ray_ranks import start_of
from parallel_backend.wire import messages as m
from parallel_backend.wire.rank_settings import P2P_DISABLE, SELF_TEST

from .memory_guard import MakeRoom, no_room
from .placement.memory_model import Request
from .remote_transformer import RemoteTransformer

log = logging.getLogger(__name__)
T = TypeVar("T")
SECOND_TRY_SECONDS = 15.0
"""Limit of the self-test's parts without P2P: who has waited a minute in vain is not to wait for another one."""


@dataclass(frozen=True)
class ModelKey:
    """Everything that a model is loaded with. Equal keys share the ranks and the weights on them."""

    path: Path
    dtype: str
    devices: tuple[str, ...]
    degrees: Degrees
    attention: str
    """The kernel, see core/attention_kernels.py."""
    stage_split: str = "auto"
    compile: bool = False
    transfer_dtype: str = "full"
    planned: str = ""
    """What the planner chose degrees and devices from. Empty: the user chose them."""


@dataclass(frozen=True)
class Aside:
    """A pool that was used before another one, and what is on it."""

    pool: Pool
    key: ModelKey | None = None
    model: RemoteTransformer | None = None
    owner: Any = None


class Registry:
    """Keeps the pool of the devices used last, and the model used last on it. Thread-safe.

    Pools on GPUs that are apart from those are kept aside, each with its model: a guider may have a MODEL for each side.
    """

    def __init__(self):
        self.logs: Callable[[], Path | None] = lambda: None
        """Folder in which logs of ranks to be started are kept, see pool.Pool. None: nowhere."""
        self.threads: int | None = None
        """CPU threads of each rank to be started, see pool.Pool. None: the cores are shared out."""
        self._lock = threading.RLock()  # make_room may unload another model, on the thread that loads this one
        self._pool: Pool | None = None
        self._key: ModelKey | None = None
        self._model: RemoteTransformer | None = None
        self._owner: Any = None  # never read: the reference keeps it alive, see `model`
        self._aside: tuple[Aside, ...] = ()
        self._without_p2p: set[tuple[str, ...]] = set()

    def model(
        self,
        key: ModelKey,
        poll: Poll,
        progress: LoadProgress = lambda doing, fraction: None,
        owner: Any = None,
        make_room: MakeRoom = no_room,
        expected: Callable[[], Request | None] = lambda: None,
    ) -> RemoteTransformer:
        """The model of `key`. Ranks are started and the model is loaded if that is not done yet, or ranks have failed.

        `owner` is kept alive until the next call: the object that frees the weights must outlive them. `make_room`,
        `expected()`: for loading, see RemoteTransformer. A loaded model stays as it is, whatever size is expected.
        """
        with self._lock:
            self._turn_to(key.devices)
            if self._model is not None and self._key == key:
                self._owner = owner
                return self._model
            checkpoint = open_checkpoint(key.path)

            def load() -> RemoteTransformer:
                return RemoteTransformer(
                    self._pool,
                    checkpoint,
                    key.degrees,
                    key.dtype,
                    key.attention,
                    poll,
                    key.stage_split,
                    progress,
                    compile=key.compile,
                    transfer_dtype=key.transfer_dtype,
                    make_room=make_room,
                    expected=expected(),
                )

            try:
                self._model = None
                self._model = self._on_ranks(key.devices, load)
                self._key, self._owner = key, owner
            except BaseException:  # Cancel too: half-loaded ranks are useless
                self._drop(politely=False)
                raise
            return self._model

    def planned(self, key: ModelKey) -> ModelKey | None:
        """Key of the model on ranks now, if it differs from `key` in nothing but what the planner chose. None otherwise."""
        with self._lock:
            present = self._key if self._model is not None and self._pool.error is None else None
        if present is None or replace(present, devices=key.devices, degrees=key.degrees) != key:
            return None
        return present

    def unload(self, key: ModelKey | None = None) -> None:
        """Free what the ranks hold, if that is the model of `key`, or if `key` is None. The ranks stay for the next model.

        Returns when the memory is free. Micro-steps under way finish first.
        """
        with self._lock:
            for each in [each for each in self._aside if key in (None, each.key)]:
                self._aside = tuple(other for other in self._aside if other is not each)
                if self._free(each.pool, each.model):
                    self._aside += (Aside(each.pool),)
            present = self._key if self._model is not None else None
            if self._pool is None or key not in (None, present):
                return
            model, self._model = self._model, None
            if not self._free(self._pool, model):
                self._pool = self._key = None

    @staticmethod
    def _free(pool: Pool, model: RemoteTransformer | None) -> bool:
        """Free what these ranks hold. False: they have failed, and are ended."""
        try:
            if model is not None:
                model.retire()
            wait_for(pool.ask(m.Unload(), m.Unloaded), lambda: None)  # also a VAE's decoder
        except RankError as error:  # the memory is free, and the next use starts new ranks
            log.warning("%s", str(error))  # as text: a kept record would keep the traceback's frames
            pool.close()
            return False
        return True

    def release_unused(self, key: ModelKey, device: str) -> int:
        """Have the ranks give back memory that their allocators keep for later. Bytes that came free on `device`.

        Their model, which is that of `key`, stays. Waits for micro-steps that are under way.
        """
        with self._lock:
            model = self._model_of(key)
            if model is None or (pool := model.pool).error is not None:
                return 0
            try:
                released = wait_for(pool.ask(m.ReleaseUnused(), m.UnusedReleased), lambda: None)
            except RankError as error:  # its memory is free too, which nobody counts here
                log.warning("%s", str(error))
                return 0
            return sum(reply.freed_bytes for reply in released if pool.devices[reply.rank] == device)

    def _model_of(self, key: ModelKey) -> RemoteTransformer | None:
        """The model of `key`, if it is on ranks."""
        found = [each.model for each in self._aside if each.key == key]
        return next((model for model in (self._model if self._key == key else None, *found) if model is not None), None)

    def runs_on(self, devices: tuple[str, ...]) -> bool:
        """There are working ranks on just these devices. Never waits."""
        pools = [self._pool, *(each.pool for each in self._aside)]
        return any(pool is not None and pool.error is None and pool.devices == devices for pool in pools)

    def bytes_on(self, key: ModelKey, device: str) -> int:
        """Bytes that ranks hold of the model of `key` on one device ('cuda:0'). 0 if it is not loaded. Never waits."""
        model = self._model_of(key)
        return model.bytes_on(device) if model is not None and model.pool.error is None else 0

    def pool_for(self, devices: tuple[str, ...] | None, poll: Poll) -> Pool | None:
        """The ranks on these devices, started if they do not run. `devices` None: the ranks that run now, or None."""
        with self._lock:
            self._turn_to(devices)
            if devices is not None:
                self._on_ranks(devices, lambda: wait_for(self._pool.ready, poll))
            elif self._pool is not None:
                wait_for(self._pool.ready, poll)
            return self._pool

    def present(self) -> RemoteTransformer | None:
        """The model on ranks now, or None if there is none or ranks have failed. Loads and starts nothing."""
        with self._lock:
            working = self._pool is not None and self._pool.error is None
            return self._model if working else None

    @contextlib.contextmanager
    def borrow(self, devices: tuple[str, ...], poll: Poll = lambda: None) -> Iterator[Pool]:
        """Context that has the ranks on these devices for something other than sampling, started if they do not run.

        Their model counts as gone: the next `model` loads it again. An exception inside ends the ranks, since their state
        is unknown.
        """
        with self._lock:
            self._turn_to(devices)
            self._key = self._model = None
            try:
                self._on_ranks(devices, lambda: wait_for(self._pool.ready, poll))
            except BaseException:
                self._drop(politely=False)
                raise
            pool = self._pool
        try:
            yield pool
        except BaseException:
            with self._lock:
                if self._pool is pool:
                    self._drop(politely=False)
            raise

    def close(self) -> None:
        """End the ranks, which frees everything they hold."""
        with self._lock:
            self._drop()
            self._owner = None
            for each in self._aside:
                each.pool.close()
            self._aside = ()

    def _on_ranks(self, devices: tuple[str, ...], use: Callable[[], T]) -> T:
        """What `use` gives with ranks on these devices.

        Where NCCL's links fail their self-test, once more with new ranks that have P2P off: what fails first is direct
        access between consumer cards. It stays off for these devices as long as the process lives.
        """
        self._start(devices)
        try:
            return use()
        except LinksDown as error:
            if error.backend != "nccl" or not self._pool.self_test.p2p or P2P_DISABLE in os.environ:
                raise
            log.warning("%s\nParallel DiT: starting new ranks without P2P", str(error))
        self._drop(politely=False)
        self._without_p2p.add(devices)
        self._start(devices)
        try:
            return use()
        except BaseException:  # it was not P2P, or nobody knows: Cancel, a file that cannot be read
            self._without_p2p.remove(devices)
            raise

    def _turn_to(self, devices: tuple[str, ...] | None) -> None:
        """End the ranks if they have failed, or if `devices` is given and they are on other devices.

        But those that are apart from `devices` are kept aside, and ranks on these devices that are aside come back.
        """
        if self._pool is not None and (self._pool.error is not None or devices not in (None, self._pool.devices)):
            if self._pool.error is None and apart(self._pool.devices, devices):
                self._aside += (Aside(self._pool, self._key, self._model, self._owner),)
                self._pool = self._key = self._model = None
            else:
                self._drop()
        if self._pool is not None or devices is None:
            return
        aside, self._aside = self._aside, ()
        for each in aside:
            if each.pool.error is None and each.pool.devices == devices:
                self._pool, self._key, self._model, self._owner = each.pool, each.key, each.model, each.owner
            elif each.pool.error is None and apart(each.pool.devices, devices):
                self._aside += (each,)
            else:
                each.pool.close()

    def _start(self, devices: tuple[str, ...]) -> None:
        if self._pool is None:
            log.info("Parallel DiT: starting %d ranks on %s", len(devices), ", ".join(devices))
            without = devices in self._without_p2p
            self_test = replace(SELF_TEST, p2p=False, seconds=SECOND_TRY_SECONDS) if without else SELF_TEST
            self._pool = Pool(devices, threads=self.threads, start=start_of(devices), logs=self.logs(), self_test=self_test)

    def _drop(self, politely: bool = True) -> None:
        if self._pool is not None:
            self._pool.close(politely)
        self._pool = self._model = self._key = None


def apart(these: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Both are GPUs of this machine, and none is in both."""
    return all(device.startswith("cuda") for device in (*these, *others)) and not {*these} & {*others}


@functools.cache
def registry() -> Registry:
    """The process's registry. Its ranks end with the process."""
    one = Registry()
    atexit.register(one.close)
    return one
