"""Ranks that break on command: `entry` takes the place of entry.main.

They look at a file whenever something happens that a fault could strike at, so ranks that outlived one fault take the
next. All is done around the product's own functions; it knows nothing of it.
"""

import functools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parallel_backend.rank.start.entry import main
from parallel_backend.rank.start.parent_watch import end_with_parent
from parallel_backend.wire.rank_settings import RankSettings

from .fault import INJECTED, Fault

ARMED, FIRED, ACTED = "armed.json", "fired.json", "acted"
MODEL_FILE, DAMAGED = "model file while it is read", "damaged.safetensors"
"""A kind of fault, and the file that it damages."""
LOADING_EVENTS = 40
"""That every rank has, at least."""
STRIKES_BY_CLIENT = 20.0
"""Seconds that a rank waits in the middle of its work for the client's process to do the harm."""
SLOW = 1.5


def write(path: Path, content: Any) -> None:
    """All of it or nothing, for whoever reads at the same time."""
    whole = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    whole.write_text(json.dumps(content))
    whole.replace(path)


def now() -> float:
    """The same in all processes of a machine."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Agent:
    """Counts the rank's events and strikes at the one that the fault names."""

    def __init__(self, folder: Path, rank: int, connection: Connection):
        self.folder, self.rank, self.connection = folder, rank, connection
        self.phase = ""  # of the micro-step that is computed
        self._known: tuple[int, Fault | None] = (0, None)  # which file it was, and what it says
        self._counting = self._count = 0

    def fault(self) -> Fault | None:
        """The one that is armed for this rank."""
        try:
            stamp = os.stat(self.folder / ARMED)
        except FileNotFoundError:
            return None
        key = stamp.st_mtime_ns ^ stamp.st_ino
        if self._known[0] != key:
            try:
                self._known = key, Fault(**json.loads((self.folder / ARMED).read_text()))
            except FileNotFoundError:
                return None
        fault = self._known[1]
        return fault if fault is not None and fault.victim == self.rank else None

    def at(self, event: str, value: Any = None) -> Any:
        """Something happens of which `value` came. The same, or what the fault makes of it."""
        fault = self.fault()
        if fault is None or fault.phase != event:
            return value
        if self._counting != self._known[0]:
            self._counting, self._count = self._known[0], 0
        self._count += 1
        if self._count != fault.moment + 1:
            return value
        write(self.folder / FIRED, {"at": now(), "rank": self.rank})
        return _STRIKES[fault.kind](self, fault, value)

    def wait_for_client(self, _fault: Fault, value: Any) -> Any:
        deadline = time.monotonic() + STRIKES_BY_CLIENT
        while not (self.folder / ACTED).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        return value


def _signal(number: int) -> Callable[..., Any]:
    def strike(_agent: Agent, _fault: Fault, value: Any) -> Any:
        os.kill(os.getpid(), number)
        return value

    return strike


def _raise(_agent: Agent, _fault: Fault, _value: Any) -> Any:
    raise RuntimeError(INJECTED)


def _run_out_of_memory(_agent: Agent, fault: Fault, _value: Any) -> Any:
    import torch

    if fault.variant == "torch":
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 20.00 GiB ({INJECTED})")
    return torch.empty(1 << 50, dtype=torch.uint8)


def _spoil(_agent: Agent, _fault: Fault, value: Any) -> Any:
    """One feature of what a block gives: of the picture's tokens, which are the first of two streams. The last block gives
    places for other bands' tokens too."""
    picture, *others = value if isinstance(value, tuple) else (value,)
    spoiled = picture.clone()
    spoiled[0, :, 0] = float("nan")
    return (spoiled, *others) if isinstance(value, tuple) else spoiled


def _sleep(_agent: Agent, _fault: Fault, value: Any) -> Any:
    time.sleep(SLOW)
    return value


def _hang(_agent: Agent, _fault: Fault, _value: Any) -> Any:
    while True:
        time.sleep(3600)


def _cut_file_short(agent: Agent, _fault: Fault, value: Any) -> Any:
    path = agent.folder / DAMAGED
    os.truncate(path, path.stat().st_size // 3)
    return value


_STRIKES: dict[str, Callable[[Agent, Fault, Any], Any]] = {
    "killed": _signal(signal.SIGKILL),
    "stopped": _signal(signal.SIGSTOP),
    "raises": _raise,
    "out of memory": _run_out_of_memory,
    "NaN": _spoil,
    "slow": _sleep,
    "hangs": _hang,
    MODEL_FILE: _cut_file_short,
    "cancelled": Agent.wait_for_client,
}


def _before(agent: Agent, owner: Any, name: str, event: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        agent.at(event)
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


def install(agent: Agent) -> None:
    """Have the agent see every event of EVENTS."""
    from parallel_backend.rank import worker
    from parallel_backend.rank.comm import peers
    from parallel_backend.rank.engine import Engine
    from parallel_backend.rank.stage.lora import Adapters
    from parallel_backend.rank.stage.store.device_copies import CudaCopies
    from parallel_backend.rank.stage.store.weight_store import WeightStore
    from parallel_backend.rank.stage.weights import StageWeights
    from parallel_backend.rank.vae.part import VAEPart

    _before(agent, worker, "run", "start")
    _before(agent, peers, "join", "rendezvous")
    _before(agent, worker, "leave", "closing")
    _before(agent, VAEPart, "run", "decoding")
    _before(agent, Engine, "put_conditioning", "conditioning")
    _before(agent, Engine, "close_run", "close run")
    _before(agent, Engine, "close", "unload")
    _before(agent, Adapters, "add", "adapt")
    _before(agent, WeightStore, "set_resident", "giving way")
    _before(agent, CudaCopies, "copy", "copying")
    _watch_loading(agent, StageWeights, WeightStore)
    _watch_blocks(agent, Engine)
    threading.Thread(target=_idle, args=(agent,), name="faults", daemon=True).start()


def _watch_loading(agent: Agent, weights_class: Any, store_class: Any) -> None:
    """An event for each parameter that the rank reads, and then as many as it takes: other ranks may have read the rest."""
    load = store_class.load

    def loading(store: Any, *arguments: Any, **named: Any) -> None:
        load(store, *arguments, **named)
        for _ in range(LOADING_EVENTS):
            agent.at("loading")

    _before(agent, weights_class, "read", "loading")
    store_class.load = loading


def _watch_blocks(agent: Agent, engine_class: Any) -> None:
    """An event for each block that has run, with what came of it."""
    make, step = engine_class.__init__, engine_class.step

    def init(engine: Any, *arguments: Any) -> None:
        make(engine, *arguments)
        for record in engine.stage.built.own.blocks:
            block = engine.stage.model.get_submodule(record.name)
            if any(True for _ in block.parameters()):  # this stage's
                block.register_forward_hook(seen)

    def seen(_block: Any, _inputs: Any, output: Any) -> Any:
        return agent.at(agent.phase, output)

    def stepping(engine: Any, message: Any, upcoming: Any) -> Any:
        whole = message.tokens == engine.conditionings[message.conditioning].token_order.span
        agent.phase = "exact" if whole and not message.stale else "banded"
        return step(engine, message, upcoming)

    engine_class.__init__, engine_class.step = init, stepping


def _idle(agent: Agent) -> None:
    while True:
        agent.at("idle")
        time.sleep(0.02)


def entry(folder: Path, temporary: Path, settings: RankSettings, connection: Connection) -> None:
    """As entry.main. `folder`: where the files are that the harness and its ranks speak through."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    agent = Agent(folder, settings.rank, connection)
    agent.at("start")
    end_with_parent(settings.rendezvous.parent)  # as `main` does first: what follows takes seconds
    install(agent)
    main(settings, connection)
