"""The registry that faults are tried on, with ranks that break on command, and what prompts on it do."""

import contextlib
import functools
import gc
import logging
import multiprocessing.util
import operator
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.client import registry as registry_module
from parallel_backend.client.call import ModelCall
from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.setup import ALLOWED, Offload, Setup
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.pool import Pool, wait_for
from parallel_backend.processes.watchdog import STALL_FACTOR, START_SECONDS
from testing import mini
from testing.models import Cancelled, nobody
from testing.vaes import OnRanks, made_of, small_vae
from tests.rank.test_lora import lora
from tests.rank.test_vae import latent
from tests.support.emulated_gpu.machine import machine

from . import census, rank
from .fault import Fault
from .rank import DAMAGED, MODEL_FILE
from .table import DEGREES, GIVING_WAY, STREAMED

STEPS = 4
RESIDENT = 0.6
"""Of the weights of a model that gives way, on the device: some blocks, and the slots of the others."""
ALL_STREAMED = Offload(leave_free=1 << 50)
LIMIT = 1e-5
"""Relative difference of an exact call from diffusers' own forward."""
ALONE = 0.5
"""Seconds in which ranks that have been sent nothing would show that something has gone wrong."""

Result = list[torch.Tensor]


class Warnings(logging.Handler):
    """Keeps what the registry warns of: unloading raises nothing."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class FaultSession:
    """`expected`: by degrees and by what was asked for, what came of it undisturbed, to compare bit for bit.

    `silence`: see pool.Pool. `cards`: ranks are on CUDA devices, two of them. Made by `fault_session`.
    """

    def __init__(self, folder: Path, silence: float, cards: bool = False):
        self.folder, self.silence, self.cards = folder, silence, cards
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.model = mini.random_model()
        self.path = mini.save(self.model, folder / "tiny.safetensors")
        self.given = mini.inputs()
        self.deltas = lora(load_file(self.path))
        self.starts_within = START_SECONDS
        self.registry = Registry()
        self.warnings = Warnings()
        self._cancelling = False
        self.expected: dict[str, dict[str, Result]] = {}
        self.usual: dict[int, census.Census] = {}  # by number of ranks, while all is well

    def start(self, devices: tuple[str, ...], **named: Any) -> Pool:
        """In place of Pool where the registry starts one."""
        entry = functools.partial(rank.entry, self.folder, self.temporary)
        start = functools.partial(LocalRanks, entry=entry)
        pool = Pool(devices, **named | {"threads": 1, "silence": self.silence, "start": start})
        pool.watchdog.start = self.starts_within
        return pool

    def pool(self) -> Pool | None:
        return next(reversed(self.registry.pools.working), None)

    def bound(self, patience: float) -> float:
        """Have the ranks' watchdog wait no longer than `patience` seconds for a sign of progress; for how long it does."""
        watchdog = self.pool().watchdog
        watchdog.first = watchdog.stall = patience
        return max(patience, STALL_FACTOR * watchdog._longest)

    def devices(self, degrees: str) -> tuple[str, ...]:
        world = DEGREES[degrees].world
        if self.cards:  # those that give way in another order, so that one can tell
            return ("cuda:1", "cuda:0") if degrees.endswith(GIVING_WAY) else ("cuda:0", "cuda:1")
        return ("cpu",) * world

    def key(self, degrees: str, path: Path | None = None) -> Setup:
        offload = ALL_STREAMED if degrees.endswith(STREAMED) else ALLOWED
        devices, own = self.devices(degrees), mini.proven(tensor=DEGREES[degrees].tensor)
        key = Setup(path or self.path, "fp32", devices, DEGREES[degrees], "sdpa", "even", own_class=own)
        return replace(key, offload=offload)

    def poll(self) -> None:
        """The user's Cancel, as soon as a rank says that it is there. The rank goes on when it has been seen."""
        if self._cancelling and (self.folder / rank.FIRED).exists():
            self._cancelling = False
            rank.write(self.folder / rank.ACTED, None)
            raise Cancelled

    def sample(self, key: Setup) -> Result:
        """A prompt: an exact call, and a run with a warm-up step and stale ones."""
        x, timestep, tensors = self.given
        assert key.own_class is not None
        checkpoint = mini.with_call(open_own_class(key.path, key.own_class))
        model = self.registry.model(key, self.poll, opened=checkpoint)
        if key.devices == ("cuda:1", "cuda:0"):
            self.give_way(model)
        assert key.offload == ALLOWED or min(model.resident.host_bytes) > 0 or key.degrees.sequence > 1
        model.adapt(None, (), self.poll)
        exact = model.predict(ModelCall(x, timestep, tensors), self.poll)
        bands = 1 if key.degrees.displaced else 2
        prompt = Prompt(tensors, tensors, 1.0)
        return [exact, sample_in_bands(model, x, linear_sigmas(STEPS), prompt, bands, 1, self.poll)[0]]

    def give_way(self, model: RemoteTransformer) -> None:
        """All weights come to the device, and most go to host memory again."""
        for share in (1.0, RESIDENT):
            moved = model.resident.tell([int(share * nbytes) for nbytes in model.resident.wanted])
            assert moved is None or wait_for(moved, self.poll)
        assert all(map(operator.lt, model.resident.device_bytes, model.resident.wanted))

    def adapted(self, degrees: str) -> Result:
        model = self.registry.model(self.key(degrees), self.poll)
        model.adapt("LoRA", self.deltas, self.poll)
        return [model.predict(ModelCall(*self.given), self.poll)]

    def decoded(self, degrees: str) -> Result:
        pool = self.registry.pool_for(self.devices(degrees), self.poll)
        decoder = OnRanks(pool, "vae", lambda: made_of(small_vae()))
        return [decoder.run(latent(1, 4, 8, 6), self.poll).clone()]  # kept: a file of shared memory less

    def standard(self, degrees: str) -> Result:
        return self.sample(self.key(degrees))

    def learn(self, degrees: str) -> None:
        """What comes of everything with these degrees while nothing is wrong, and what this process then has."""
        if degrees in self.expected:
            return
        found = {"standard": self.standard(degrees)}
        reference = mini.reference(self.model, *self.given)
        assert mini.relative(found["standard"][0], reference) <= LIMIT
        if not degrees.endswith((STREAMED, GIVING_WAY)):
            found |= {"decoded": self.decoded(degrees), "adapted": self.adapted(degrees)}
            assert mini.relative(found["adapted"][0], reference) > LIMIT
            self.standard(degrees)
        if self.cards:
            self.registry.close()
            with mock.patch.object(self, "devices", lambda _degrees: ("cpu",) * DEGREES[degrees].world):
                assert all(map(torch.equal, self.sample(replace(self.key(degrees), offload=ALLOWED)), found["standard"]))
            self.registry.close()
            self.standard(degrees)
        self.expected[degrees] = found
        self.usual.setdefault(DEGREES[degrees].world, census.take(self.temporary))

    def prepare(self, fault: Fault) -> None:
        """All that comes before the phase."""
        if (pool := self.pool()) is not None and pool.devices != self.devices(fault.degrees):
            self.registry.close()  # else ranks of before stay beside those of this fault, and are counted with them
        self.learn(fault.degrees)
        if fault.phase in ("start", "rendezvous"):
            self.registry.close()
        elif fault.phase in ("loading", "conditioning"):
            self.registry.pool_for(self.devices(fault.degrees), nobody)
            self.registry.unload()
        else:
            self.standard(fault.degrees)
        if fault.phase == "giving way":  # nothing is in host memory yet
            self.registry.unload()
        elif fault.phase == "adapt":
            self.adapted(fault.degrees)
            self.standard(fault.degrees)
        elif fault.phase == "decoding":
            self.decoded(fault.degrees)
        if fault.kind == MODEL_FILE:
            shutil.copy(self.path, self.folder / DAMAGED)
        self.warnings.texts.clear()

    def attempt(self, fault: Fault, wait: Callable[[], bool]) -> Result | None:
        """What a user does while the fault strikes; the result to compare. `wait`: False once it has been long enough."""
        if fault.kind == "cancelled":
            return self.cancel(fault)
        degrees = fault.degrees
        match fault.phase:
            case "adapt":
                return self.adapted(degrees)
            case "decoding":
                return self.decoded(degrees)
            case "unload":
                self.registry.unload()
                return None
            case "closing":
                self.registry.close()
                return None
            case "idle":
                self._wait_for_error(wait)
                return self.standard(degrees)
        return self.sample(self.key(degrees, self.folder / DAMAGED if fault.kind == MODEL_FILE else None))

    def cancel(self, fault: Fault) -> None:
        """A prompt is cancelled where the fault says. AssertionError if it ends before, and if Unload leaves something."""
        run = {"adapt": self.adapted, "decoding": self.decoded}.get(fault.phase, self.standard)
        self._cancelling = True
        try:
            run(fault.degrees)
        except Cancelled:
            pass
        else:
            raise AssertionError("the prompt ended and was not cancelled")
        finally:
            self._cancelling = False
        if fault.variant == "unloads":
            self.unload()

    def unload(self) -> None:
        """AssertionError if ranks then have something on emulated cards, or have registered host memory with them."""
        self.registry.unload()
        if self.cards:
            left, locked = machine.reserved_elsewhere, machine.registered_elsewhere
            assert not any(left) and not locked, f"bytes left: {left} on the cards, {locked} page-locked"

    def _wait_for_error(self, wait: Callable[[], bool]) -> None:
        """As long as it may take; what the pool then says is what a prompt would."""
        pool = self.pool()
        while pool.error is None and wait():
            time.sleep(0.01)
        if pool.error is not None:
            raise pool.error

    def is_right(self, fault: Fault, result: Result | None) -> bool:
        """Bit for bit."""
        if result is None:
            return True
        what = {"adapt": "adapted", "decoding": "decoded"}.get(fault.phase, "standard")
        return all(torch.equal(a, b) for a, b in zip(result, self.expected[fault.degrees][what], strict=True))

    def is_right_again(self, degrees: str) -> bool:
        """The next prompt."""
        return all(
            torch.equal(a, b) for a, b in zip(self.standard(degrees), self.expected[degrees]["standard"], strict=True)
        )

    def left_over(self, degrees: str, seconds: float) -> list[str]:
        """What this process has beside what it has while all is well."""
        usual = self.usual[DEGREES[degrees].world]
        return census.settle(lambda: census.left_over(usual, census.take(self.temporary)), seconds)


@contextlib.contextmanager
def fault_session(silence: float, cards: bool = False) -> Iterator[FaultSession]:
    """A FaultSession with a folder for temporary files of its own, so that what is left there can be told."""
    multiprocessing.util.get_temp_dir()  # its own, for as long as this process runs
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, contextlib.ExitStack() as stack:
        made = FaultSession(Path(folder), silence, cards)
        stack.enter_context(mock.patch.object(tempfile, "tempdir", str(made.temporary)))
        stack.enter_context(mock.patch.object(registry_module, "Pool", made.start))
        gc.freeze()  # what is imported: every census collects
        stack.callback(gc.unfreeze)
        log = logging.getLogger("parallel_backend.client.registry")
        log.addHandler(made.warnings)
        stack.callback(log.removeHandler, made.warnings)
        stack.callback(lambda: made.registry.close())
        yield made
