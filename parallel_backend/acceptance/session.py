"""What the checks of a self-test share: settings, findings, the ranks that run now, a tiny model's file, and cancelling."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_setup
from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Predict
from parallel_backend.core.cores import usable_cores
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.dtypes import HALVES, native_halves
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.processes.pool import Poll, Pool, RankError
from parallel_backend.wire.rank_settings import BY_NCCL, Transport

from . import tiny_model

Native = Callable[[Checkpoint], AbstractContextManager[Predict]]
"""Function from a checkpoint to a context with the same model in the host itself. Raises NotLookedAt if the host cannot load
or call it."""


class NotLookedAt(Exception):
    """A check cannot be run here. The text says why, as the end of a sentence."""


class Findings:
    """`figures`: name -> JSON value. `wrong`: failures. `left_out`: parts that could not be checked, with the reason."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.left_out: list[str] = []

    def note(self, name: str, value: Any) -> None:
        self.figures[name] = value

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Record a figure. It is a failure if it is above the limit or NaN."""
        self.note(name, value)
        self.expect(value <= limit, f"{name} is {value:.3g}, above its limit of {limit:.3g}")

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Context around a part `what` of a check, such as a mode. If the part fails, the other parts are still checked.

        A RankError in it is a failure. A ValueError is a refusal: the part is left out.
        """
        try:
            yield
        except RankError as error:
            self.wrong.append(f"{what}: {error}")
        except ValueError as refusal:
            self.leave_out(what, str(refusal))

    def leave_out(self, what: str, reason: str) -> None:
        self.left_out.append(f"{what}: {reason}")


def at_least_two(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the devices, or a single device twice, because checks of modes need two ranks."""
    return devices if len(devices) > 1 else 2 * devices


@dataclass(frozen=True)
class OwnModel:
    """The user's model, which runs as ComfyUI's own class: its file, the class, a call of it, and times of a run, the first
    one first."""

    path: Path
    own: OwnClass
    call: Call
    times: tuple[float, ...]


@dataclass(frozen=True)
class Settings:
    """The inputs of a self-test."""

    devices: tuple[str, ...]
    model: OwnModel | None = None
    """The model with which the host, one rank and all ranks sample. None: this check is skipped."""
    steps: int = 8
    """The number of sampling steps with that model."""

    def __post_init__(self):
        if not self.devices or any(map(on_ray, self.devices)):
            raise ValueError("devices: the self-test tests only this machine. Name its devices, such as cuda:0,cuda:1.")

    @property
    def half(self) -> str | None:
        """The half precision in which all devices compute. None: there is none, as on old GPUs."""
        if not self.on_gpus:
            return "bf16"
        return next((half for half in HALVES if all(half in native_halves(device) for device in self.devices)), None)

    @property
    def on_gpus(self) -> bool:
        return all(device_kind(device) == "cuda" for device in self.devices)


@dataclass(frozen=True)
class Host:
    """The program that runs the self-test."""

    name: str = "command line"
    options: tuple[str, ...] = ()
    """The options on its command line."""
    native: Native | None = None
    """The host's own way to run a model, to compare with. None: the host cannot run models itself."""
    folder: Callable[[], Path | None] = lambda: None
    """Returns the folder in which later starts of ranks look for how these GPUs transfer. None: nothing is kept."""


@dataclass
class SelfTestSession:
    """At most one set of ranks runs at a time, so that a model has each device to itself. Close the session at the end.

    The ranks are started as for a prompt, by a registry: without P2P if their links fail with it. But a rank's number of CPU
    threads does not depend on the number of ranks, so that two ranks have twice one rank's.

    An exception of `poll`, here or in any wait, ends the self-test and is kept in `stopped`.
    """

    settings: Settings
    host: Host = field(default_factory=Host)
    on_poll: Poll = lambda: None
    stopped: BaseException | None = None
    _registry: Registry = field(default_factory=Registry)
    _loaded: Setup | None = None

    def __post_init__(self):
        self._registry.folder = self.host.folder
        self._registry.pools.transports.turn_to(self.settings.devices, BY_NCCL)  # whatever an earlier start found out
        self._registry.threads = max(1, usable_cores() // self.world)

    @property
    def world(self) -> int:
        return len(self.settings.devices)

    def poll(self) -> None:
        try:
            self.on_poll()
        except BaseException as error:
            self.stopped = error
            raise

    def ranks(self) -> Pool:
        """Return a pool on the devices. It is started now if it does not run yet."""
        pool = self._registry.pool_for(self.settings.devices, self.poll, alone=True)
        assert pool is not None  # as devices are named
        return pool.whole

    def ranks_by(self, transport: Transport) -> Pool:
        """Return ranks that transfer in this way, or in another one if their links fail in it."""
        if self.ranks().self_test.transport != transport:
            self.end_ranks()
            self._registry.pools.transports.turn_to(self.settings.devices, transport)
        return self.ranks()

    def keep(self, transport: Transport) -> None:
        """Have ranks on these devices transfer in this way from now on."""
        self.end_ranks()
        self._registry.pools.transports.keep(self.settings.devices, transport)

    def load(self, degrees: Degrees, dtype: str, path: Path | None = None, own: OwnClass | None = None) -> RemoteTransformer:
        """Return a model on the first ranks, cut evenly, which replaces their present one: the file `path` by its class
        `own`, or the tiny model.

        Raises ValueError if the model does not allow the degrees, or does not fit.
        """
        devices, own = self.settings.devices[: degrees.world], own or tiny_model.tried(degrees.tensor)
        setup = Setup(path or self.tiny_file, dtype, devices, degrees, "auto", "even", own_class=own)
        open_setup(setup).check_degrees(degrees)  # a refusal by the ranks would end them
        if setup != self._loaded:
            self._registry.unload()
            self._loaded = setup
        return self._registry.model(setup, self.poll)

    def end_ranks(self) -> None:
        self._registry.close()

    @cached_property
    def folder(self) -> Path:
        """Folder for the self-test's temporary files."""
        return Path(tempfile.mkdtemp(prefix="parallel-dit-self-test-"))

    @cached_property
    def tiny_model(self) -> torch.nn.Module:
        """The model that is stored in `tiny_file`, on the CPU in fp32."""
        return tiny_model.tiny_model()

    @cached_property
    def tiny_file(self) -> Path:
        return tiny_model.save(self.tiny_model, self.folder / "tiny.safetensors")

    def close(self) -> None:
        self.end_ranks()
        if "folder" in self.__dict__:
            shutil.rmtree(self.folder, ignore_errors=True)
