"""One rank: a process that does what the client's messages say, in order, until the connection ends."""

import contextlib
import gc
import logging
import os
import queue
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.rank.comm.guard import Guard
from parallel_backend.rank.comm.link_probe import probe_links
from parallel_backend.rank.comm.peers import Peers
from parallel_backend.rank.comm.process_group import leave
from parallel_backend.rank.comm.rendezvous import Rendezvous
from parallel_backend.rank.comm.self_test import LinkError
from parallel_backend.rank.comm.transfers import PeerError
from parallel_backend.rank.stage.lora import parameter_names
from parallel_backend.rank.stage.store.device_copies import DeviceCopies, copies_of
from parallel_backend.rank.vae.part import VAEPart, free_bytes
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.heartbeat import Heartbeat, send_heartbeats
from parallel_backend.wire.rank_settings import RankSettings

from .allocator import give_back, keep_freed
from .block_probe import probe
from .engine import Engine
from .loaded_stage import LoadedStage
from .pinned import pinning

log = logging.getLogger(__name__)

REPORT_STEP = 0.01
"""Share of a rank's weights from one report of how far loading is to the next."""

REST_SECONDS = 0.2
"""Without a message, beyond the time between the last two, after which a CPU rank returns freed memory. Within a sampler's
run it does not: there messages come at about equal intervals."""

LOADING = "loading"
DOING = {
    **dict.fromkeys((m.Load, m.Probe, m.PutVAE), LOADING),
    **dict.fromkeys((m.Adapt, m.Rescale, m.Weigh, m.DropAdapters, m.AdaptersSent), "adapting a LoRA"),
    m.SetResident: "moving weights between its device and host memory",
    m.PutConditioning: "taking in a prompt",
    **dict.fromkeys((m.BeginVAE, m.RunVAE, m.EndVAE, m.DropVAE), "running the VAE"),
    m.ProbeLinks: "timing transfers",
    m.CloseRun: "closing a run",
    m.Unload: "unloading",
    m.FindNotFinite: "looking for what is not finite",
}
"""What a message has the rank do, in the words of an error; micro-steps have their own."""
BETWEEN = "between micro-steps"
READING = "reading what the client sent"
LONGEST_TEXT = 1 << 16
"""Characters of an error's summary or traceback that are sent: a message's header has room for no more than some."""


class Worker:
    """Receives in a thread of its own, so that a lost client is noticed even in the middle of a transfer."""

    def __init__(
        self,
        settings: RankSettings,
        channel: Channel,
        heartbeat: Heartbeat,
        peers: Peers,
        copies: DeviceCopies | None = None,
    ):
        """`copies`: of the rank's device; None for those of its kind."""
        self.settings, self.channel, self.heartbeat, self._peers = settings, channel, heartbeat, peers
        self.device = torch.device(settings.device)
        self.copies = copies or copies_of(self.device)
        self.engines: dict[int | None, Engine] = {}
        """By the model's number."""
        self.vae: dict[str, VAEPart] = {}
        """Decoder and encoder."""
        self._inbox: queue.SimpleQueue[m.Envelope] = queue.SimpleQueue()
        self._ahead: list[m.Envelope] = []
        self._request_id: int | None = None  # of the message that is being handled, as the next
        self._model: int | None = None
        self._newest: Engine | None = None  # the one that ran the newest micro-step
        self._reported = 0.0
        self._handled_at, self._interval = time.monotonic(), 0.0

    def serve(self) -> None:
        """Handle messages until Stop. Raises whatever went wrong."""
        threading.Thread(target=self._read, name="control", daemon=True).start()
        self.channel.send(m.Ready(self.settings.rank))
        while not isinstance(message := self._next(), m.Stop):
            step = isinstance(message, m.Step)
            self.heartbeat.doing = f"micro-step {message.seq}" if step else DOING.get(type(message), BETWEEN)
            self._handle(message)
            self.heartbeat.done()
        for engine in self.engines.values():  # the process group must not end under the last micro-step's send
            engine.end_transfers()

    @property
    def engine(self) -> Engine:
        """That of the model which the message is for."""
        return self.engines[self._model]

    def _handle(self, message: Any) -> None:
        match message:
            case m.Step():
                self._turn_to(self.engine)
                output = self.engine.step(message, self._upcoming())
                if output is not None:
                    self.channel.send(output, model=self._model)
            case m.DropAdapters():
                self.engine.stage.adapters.drop()
            case m.Adapt():
                self.engine.stage.adapters.add(message)
            case m.Rescale():
                self.engine.stage.adapters.rescale(message.scales)
            case m.Weigh():
                self.engine.stage.adapters.weigh(message.strengths)
            case m.AdaptersSent():
                self._reply(m.Adapted(self.settings.rank, self.engine.adapted()))
            case m.PutConditioning():
                self.engine.put_conditioning(message)
            case m.DropConditioning():
                self.engine.drop_conditioning(message.id)
            case m.CloseRun():
                self._reply(self.engine.close_run(message.run))
            case m.PutVAE():
                self._peers.check()
                self.vae.pop(message.part, None)  # before the new one is there
                world = len(self.settings.devices)
                self.vae[message.part] = VAEPart(message, self.settings.rank, world, self.device, self.heartbeat)
            case m.BeginVAE():
                self._reply(self._begin_vae(message))
            case m.RunVAE():
                self._turn_to(None)
                self._reply(self.vae[message.part].run(message))
            case m.DropSegment():
                self.channel.return_segment(message.number)
            case m.EndVAE():
                if (part := self.vae.get(message.part)) is not None:
                    part.end()
            case m.DropVAE():
                self.vae = {name: part for name, part in self.vae.items() if name == message.keep}
                self._free()
            case m.OpenRun():
                self.engine.open_run(message)
            case m.ReadMemory():
                self._reply(self._read_memory())
            case m.ReleaseUnused():
                for engine in self.engines.values():
                    engine.drop_graphs()  # made again where they are worth it
                self._reply(m.UnusedReleased(self.settings.rank, self._release_unused()))
            case m.SetResident():
                self._reply(self._set_resident(message.resident[self.settings.rank], message.working))
            case m.FindNotFinite():
                nothing = m.NotFiniteFound(self.settings.rank, None, (), ())  # unloaded meanwhile
                engine = self.engines.get(self._model)
                self._reply(nothing if engine is None else engine.find_not_finite(message))
            case m.BeginTimeline():
                self.engine.begin_timeline()
            case m.ReadTimeline():
                self._reply(self.engine.timeline())
            case m.Probe():
                self._reply(self._probe(message))
            case m.ProbeLinks():
                self._turn_to(None)
                with self._peers.waiting():
                    found = probe_links(self.settings.rank, self.settings.devices, message.sizes)
                self._reply(found)
            case m.Load():
                self._turn_to(None)
                self.engines[self._model] = engine = self._load(message)
                names, held = parameter_names(engine.stage.model), engine.residency
                self._reply(m.Loaded(self.settings.rank, held.device_bytes, names, held.host_bytes))
            case m.Unload():
                self._unload()
                self._reply(m.Unloaded(self.settings.rank))
            case _:
                raise m.BadMessage(f"{type(message).__name__} is not for a rank")

    def _load(self, message: m.Load) -> Engine:
        rank, peers = self.settings.rank, self._peers
        stage = LoadedStage(rank, self.device, message, self._report, peers, self.heartbeat, self.copies)
        return Engine(rank, message, stage)

    def _probe(self, message: m.Probe) -> m.Probed:
        return probe(self.settings.rank, open_checkpoint(message.path), self.device, message.dtype, message.rows)

    def _reply(self, message: Any) -> None:
        """Answer the request that is being handled."""
        self.channel.send(message, self._request_id)

    def _report(self, fraction: float) -> None:
        """Tell the client how much of the weights is in place. Called before each of them."""
        self.heartbeat.done()
        if fraction == 0.0 or fraction - self._reported >= REPORT_STEP:
            self._reported = fraction
            self.channel.send(m.Loading(self.settings.rank, fraction), model=self._model)

    def _begin_vae(self, message: m.BeginVAE) -> m.VAEBegun:
        part = self.vae.get(message.part)
        if part is None or part.name != message.name:
            free = free_bytes(self.device) + (0 if part is None else part.nbytes)  # whose place it takes
            missing = max(0, message.weight_bytes + message.bytes_needed - free)
            return m.VAEBegun(self.settings.rank, False, False, missing)
        self._turn_to(None)
        return part.begin(message)

    def _turn_to(self, engine: Engine | None) -> None:
        """Let the transfers of another model end before this one's begin, or others that ranks make together: torch wants
        one group's done before the next one's."""
        if self._newest not in (None, engine):
            self._newest.rest()
        self._newest = engine

    def _read_memory(self) -> m.DeviceMemoryReport:
        """The device's memory, and what the model that asks has of it."""
        engines = self.engines.items()
        held = {number: each.residency.device_bytes + each.stage.adapters.nbytes for number, each in engines}
        own = held.pop(self._model, 0)
        vae = sum(part.nbytes for part in self.vae.values())
        return self.copies.memory(self.settings.rank, own, sum(held.values()), vae)

    def _set_resident(self, resident: int, working: bool) -> m.Residency:
        engine = self.engines.get(self._model)
        if engine is None:  # unloaded meanwhile
            return m.Residency(self.settings.rank, 0, 0)
        held = engine.set_resident(resident, working)
        self._release_unused()
        return held

    def _unload(self) -> None:
        """Free the model that the message is for. A message for none frees all of them, and the VAE's parts."""
        self._turn_to(None)
        for number in [number for number in self.engines if self._model in (None, number)]:
            self.engines.pop(number).close()
        if self._model is None:
            self.vae = {}
        self.channel.return_segments(self._model)
        self._free()

    def _free(self) -> None:
        """Return the memory of what has just been let go."""
        gc.collect()  # engine and model refer to each other: without this the old weights stay beside the new ones
        self._release_unused()

    def _release_unused(self) -> int:
        """Return memory that nothing uses to the driver, or the system. Bytes that a GPU got back; 0 on a CPU: not known."""
        if self.device.type != "cuda":
            give_back()
            return 0
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self.device)

    def _next(self) -> Any:
        """The next message, whose request `_reply` answers from now on."""
        message, self._request_id, self._model = self._ahead.pop(0) if self._ahead else self._wait()
        now = time.monotonic()
        self._interval, self._handled_at = now - self._handled_at, now
        return message

    def _wait(self) -> m.Envelope:
        self.heartbeat.doing = m.IDLE
        try:
            return self._inbox.get(timeout=REST_SECONDS + self._interval)
        except queue.Empty:
            if self.device.type == "cpu":
                give_back()
            return self._inbox.get()

    def _upcoming(self) -> m.Step | None:
        """The next message if it has arrived and is a micro-step of the same model."""
        if not self._ahead:
            try:
                self._ahead.append(self._inbox.get_nowait())
            except queue.Empty:
                return None
        message, _, model = self._ahead[0]
        return message if isinstance(message, m.Step) and model == self._model else None

    def _read(self) -> None:
        """Put what comes into the inbox. The main thread may be blocked in a transfer that will never end, so whatever ends
        this ends the process."""
        try:
            while True:
                self._inbox.put(self.channel.receive())
        except (EOFError, OSError) as error:  # the client is gone
            log.info("rank %d: control connection ended (%s)", self.settings.rank, error)
            if isinstance(self.settings.rendezvous, Path):
                shutil.rmtree(self.settings.rendezvous.parent, ignore_errors=True)
            os._exit(0)
        except BaseException as error:  # a rank that hears nothing more would go on giving signs of life
            summary, text = f"{type(error).__name__}: {error}"[:LONGEST_TEXT], traceback.format_exc()[-LONGEST_TEXT:]
            with contextlib.suppress(OSError):
                self.channel.send(m.Failure(self.settings.rank, READING, False, summary, text))
            os._exit(1)


def run(settings: RankSettings, connection: Connection, make_worker: Callable[..., Worker] | None = None) -> None:
    """A rank's whole life: join the others, serve, and report what went wrong. `make_worker`: called as Worker, and in its
    place."""
    torch.set_num_threads(settings.threads)
    channel, heartbeat = Channel(connection, borrowed=pinning(torch.device(settings.device))), Heartbeat()
    beating = (heartbeat, settings.rank, channel, settings.heartbeat_seconds)
    threading.Thread(target=send_heartbeats, args=beating, name="heartbeat", daemon=True).start()

    def fail(error: BaseException) -> None:
        """Report it and end the process. From any thread: another may be blocked for ever."""
        links = isinstance(error, LinkError)
        summary = str(error) if links else f"{type(error).__name__}: {error}"
        peer = links or isinstance(error, PeerError)
        text = "".join(traceback.format_exception(error))[-LONGEST_TEXT:]
        log.info("rank %d: %s", settings.rank, text)  # in the middle of another message the client cannot read this one
        transport = error.backend if links else ""
        with contextlib.suppress(OSError):  # the client is gone
            channel.send(m.Failure(settings.rank, heartbeat.doing, peer, summary[:LONGEST_TEXT], text, transport))
        # No clean-up of the process group: its other ranks are about to be ended, and it could wait for them.
        channel.close()
        os._exit(1)

    try:
        if settings.device.startswith("cuda"):
            torch.cuda.set_device(settings.device)
        else:
            keep_freed()
        rendezvous = Rendezvous(settings.rendezvous, len(settings.devices), settings.timeout)
        peers = Peers(settings, rendezvous, Guard(heartbeat, rendezvous.check, fail))
        peers.join()
        (make_worker or Worker)(settings, channel, heartbeat, peers).serve()
        leave()
    except BaseException as error:  # also what a library's sys.exit raises
        fail(error)
