"""The process's one set of ranks and the model on it, shared by all nodes: ComfyUI caches node outputs, ranks must not
die with them or multiply."""

import atexit
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import LoadProgress, Poll, Pool, RankError, wait_for
from parallel_backend.processes.ray_ranks import start_of
from parallel_backend.wire import messages as m

from .remote_transformer import RemoteTransformer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelKey:
    """Everything that a loaded model was loaded with. Equal keys share the ranks and the weights on them.

    `planned`: what the planner chose degrees and devices from, empty where the user did.
    """

    path: Path
    dtype: str
    devices: tuple[str, ...]
    degrees: Degrees
    attention: str
    stage_split: str = "auto"
    compile: bool = False
    transfer_dtype: str = "full"
    planned: str = ""


class Registry:
    """Keeps the pool of the last used devices and the last used model on it.

    `logs` says, whenever ranks are started, in which folder their logs are kept, see pool.Pool; None is nowhere.
    """

    def __init__(self):
        self.logs: Callable[[], Path | None] = lambda: None
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._key: ModelKey | None = None
        self._model: RemoteTransformer | None = None
        self._owner: Any = None

    def model(
        self, key: ModelKey, poll: Poll, progress: LoadProgress = lambda doing, fraction: None, owner: Any = None
    ) -> RemoteTransformer:
        """The model, loaded now if it is not, on ranks started now if there are none or they have failed.

        `owner` is kept alive until another takes its place: who is to free the weights must not be gone before them, nor
        while it frees them.
        """
        with self._lock:
            self._drop_other_than(key.devices)
            if self._model is not None and self._key == key:
                self._owner = owner
                return self._model
            checkpoint = open_checkpoint(key.path)
            try:
                self._start(key.devices)
                self._model = None
                self._model = RemoteTransformer(
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
                )
                self._key, self._owner = key, owner
            except BaseException:  # Cancel while loading too: ranks half loaded are of no use
                self._drop(politely=False)
                raise
            return self._model

    def planned(self, key: ModelKey) -> ModelKey | None:
        """The key of the model on ranks now, if it was planned from the same as `key`, whose own plan does not count."""
        with self._lock:
            present = self._key if self._model is not None and self._pool.error is None else None
        if present is None or replace(present, devices=key.devices, degrees=key.degrees) != key:
            return None
        return present

    def unload(self, key: ModelKey | None = None) -> None:
        """Free what the ranks hold, if it is the model of `key` or no key is given. They stay, for the next one.

        Returns when the memory is free: micro-steps that are under way finish first.
        """
        with self._lock:
            present = self._key if self._model is not None else None
            if self._pool is None or key not in (None, present):
                return
            model, self._model = self._model, None
            try:
                if model is not None:
                    model.retire()
                wait_for(self._pool.ask(m.Unload(), m.Unloaded), lambda: None)  # without a model, a VAE's decoder
            except RankError as error:  # its memory is free, and the next use starts new ranks
                log.warning("%s", str(error))  # a record that is kept would keep what the error was raised through
                self._drop()

    def bytes_on(self, key: ModelKey, device: str) -> int:
        """What ranks hold of the model of `key` on one device, such as 'cuda:0'; 0 while it is not loaded. Never waits."""
        model = self._model
        return model.bytes_on(device) if model is not None and self._key == key and model.pool.error is None else 0

    def pool_for(self, devices: tuple[str, ...] | None, poll: Poll) -> Pool | None:
        """The ranks on these devices, started now if other ones run or none. `devices` None: those that run, if any do."""
        with self._lock:
            self._drop_other_than(devices)
            if devices is not None:
                self._start(devices)
            if self._pool is not None:
                wait_for(self._pool.ready, poll)
            return self._pool

    def present(self) -> RemoteTransformer | None:
        """The model that is on ranks now, if there is one and they work. Loads nothing and starts nothing."""
        with self._lock:
            working = self._pool is not None and self._pool.error is None
            return self._model if working else None

    @contextlib.contextmanager
    def borrow(self, devices: tuple[str, ...]) -> Iterator[Pool]:
        """Ranks on these devices, for whatever is no sampling. Their model counts as gone: the next `model` loads it anew.

        An exception inside ends the ranks, since nobody knows what they are in the middle of.
        """
        with self._lock:
            self._drop_other_than(devices)
            self._start(devices)
            pool, self._key, self._model = self._pool, None, None
        try:
            yield pool
        except BaseException:
            with self._lock:
                if self._pool is pool:
                    self._drop(politely=False)
            raise

    def close(self) -> None:
        """End the ranks and with them whatever they hold."""
        with self._lock:
            self._drop()
            self._owner = None

    def _drop_other_than(self, devices: tuple[str, ...] | None) -> None:
        """End ranks that have failed, and those on other devices where any are named."""
        if self._pool is not None and (self._pool.error is not None or devices not in (None, self._pool.devices)):
            self._drop()

    def _start(self, devices: tuple[str, ...]) -> None:
        if self._pool is None:
            log.info("Parallel DiT: starting %d ranks on %s", len(devices), ", ".join(devices))
            self._pool = Pool(devices, start=start_of(devices), logs=self.logs())

    def _drop(self, politely: bool = True) -> None:
        if self._pool is not None:
            self._pool.close(politely)
        self._pool = self._model = self._key = None


@functools.cache
def registry() -> Registry:
    """The one of this process. Its ranks end with the process."""
    one = Registry()
    atexit.register(one.close)
    return one
