"""One rank: a process that handles the client's messages in order until the connection ends."""

import contextlib
import functools
import gc
import logging
import os
import queue
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.pinned import pin
from parallel_backend.core.torch_settings import write_settings
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
from .free_memory import device_memory
from .loaded_stage import LoadedStage
from .numa import bind_to_gpu
from .outbox import Outbox

log = logging.getLogger(__name__)

REPORT_STEP = 0.01
"""Fraction of a rank's weights that is loaded between two progress reports."""

REST_SECONDS = 0.2
"""A CPU rank returns freed memory if no message comes for this long beyond the time between the last two messages. So it
does not within a sampler's run, in which messages come at about equal intervals."""

LOADING = "loading"
DOING = {
    **dict.fromkeys((m.Load, m.Probe, m.PutVAE), LOADING),
    **dict.fromkeys((m.Adapt, m.Weigh, m.DropAdapters, m.AdaptersSent), "adapting a LoRA"),
    m.SetResident: "moving weights between its device and host memory",
    m.PutConditioning: "taking in a prompt",
    **dict.fromkeys((m.BeginVAE, m.RunVAE, m.EndVAE, m.DropVAE), "running the VAE"),
    m.ProbeLinks: "timing transfers",
    m.CloseRun: "closing a run",
    m.Unload: "unloading",
}
"""What the rank does for a message, as text for an error. Micro-steps are named by number."""
BETWEEN = "between micro-steps"
READING = "reading what the client sent"
LONGEST_TEXT = 1 << 16
"""Maximum characters of an error's summary or traceback that are sent, because a message's header is limited."""


class Worker:
    """Handles messages. A separate thread receives them, so that a lost client is noticed even during a transfer."""

    def __init__(
        self,
        settings: RankSettings,
        channel: Channel,
        heartbeat: Heartbeat,
        peers: Peers,
        copies: DeviceCopies | None = None,
    ):
        """`copies`: to and from the rank's device. None: the usual ones for its type of device."""
        self.settings, self.channel, self.heartbeat, self._peers = settings, channel, heartbeat, peers
        self.device = torch.device(settings.device)
        self.copies = copies or copies_of(self.device)
        self.engines: dict[int | None, Engine] = {}
        """Number of a model -> its engine."""
        self._outside: dict[int | None, tuple[Peers, Degrees]] = {}
        """Number of a model that only other ranks have -> its peers and degrees. This rank takes part in creating its
        groups."""
        self._threads: dict[int | None, int] = {}
        """Number of a model -> CPU threads of its micro-steps."""
        self.vae: VAEPart | None = None
        """The decoder or encoder part of a VAE on this rank, or None."""
        self._inbox: queue.SimpleQueue[m.Envelope] = queue.SimpleQueue()
        self._ahead: list[m.Envelope] = []
        self._outbox = Outbox(channel, self.device, lambda error: self._inbox.put(m.Envelope(error)))
        self._request_id: int | None = None  # of the message that is being handled, as is `_model`
        self._model: int | None = None
        self._newest: Engine | None = None  # the engine of the newest micro-step
        self._reported = 0.0
        self._handled_at, self._interval = time.monotonic(), 0.0

    def serve(self) -> None:
        """Handle messages until Stop. Raises the first error."""
        threading.Thread(target=self._read, name="control", daemon=True).start()
        self.channel.send(m.Ready(self.settings.rank))
        while not isinstance(message := self._next(), m.Stop):
            step = isinstance(message, m.Step)
            self.heartbeat.doing = f"micro-step {message.seq}" if step else DOING.get(type(message), BETWEEN)
            self._handle(message)
            if not (step and self.heartbeat.run_bytes):  # a run's first micro-step makes its buffers
                self.heartbeat.run_bytes = sum(engine.run_bytes for engine in self.engines.values())
            self.heartbeat.done()
        self._outbox.close()
        for engine in self.engines.values():  # the process group must not end under the last micro-step's send
            engine.end_transfers()

    @property
    def engine(self) -> Engine:
        """Engine of the model that the present message is for."""
        return self.engines[self._model]

    def _handle(self, message: Any) -> None:
        match message:
            case m.Step():
                self._turn_to(self.engine)
                output = self.engine.step(message, self._upcoming())
                if output is not None:
                    self._outbox.send(output, self._model)
            case m.DropAdapters():
                self.engine.stage.adapters.drop()
            case m.Adapt():
                self.engine.stage.adapters.add(message)
            case m.Weigh():
                self.engine.stage.adapters.weigh(message.strengths)
            case m.AdaptersSent():
                adapter_bytes = self.engine.adapted()
                self._reply(m.Adapted(self.settings.rank, adapter_bytes, self.engine.stage.store.host_bytes))
            case m.PutConditioning():
                self.engine.put_conditioning(message)
            case m.DropConditioning():
                self.engine.drop_conditioning(message.id)
            case m.CloseRun():
                stats = self.engine.close_run(message.run)
                if self.engine.stage.expanded.drop():
                    self._release_unused()  # gigabytes, which ComfyUI's VAE may need next
                self._reply(stats)
            case m.PutVAE():
                self._peers.check()
                ranks = self._peers.part(message.ranks).ranks
                self.vae = VAEPart(message, self.settings.rank, ranks, self.device, self.heartbeat)
            case m.BeginVAE():
                self._reply(self._begin_vae(message))
            case m.RunVAE():
                self._turn_to(None)
                assert self.vae is not None
                self._reply(self.vae.run(message))
            case m.DropSegment():
                self.channel.return_segment(message.number)
            case m.EndVAE():
                if self.vae is not None:
                    self.vae.end()
            case m.DropVAE():
                self.vae = None
                self._free()
            case m.OpenRun():
                self.engine.open_run(message)
            case m.ReadMemory():
                self._reply(self._read_memory())
            case m.ReleaseUnused():
                for each in self.engines.values():
                    each.drop_graphs()  # captured again in later micro-steps
                    each.stage.expanded.drop()
                self._reply(m.UnusedReleased(self.settings.rank, self._release_unused()))
            case m.SetResident():
                self._reply(self._set_resident(message))
            case m.BeginTimeline():
                self.engine.begin_timeline()
            case m.ReadTimeline():
                self._reply(self.engine.timeline())
            case m.Probe():
                self._reply(self._probe(message))
            case m.ProbeLinks():
                self._turn_to(None)
                with self._peers.waiting():
                    links = probe_links(self.settings.rank, self.settings.devices, message.sizes)
                self._reply(links)
            case m.Load():
                self._turn_to(None)
                peers = self._peers.part(message.ranks)
                if peers.place is None:
                    self._outside[self._model] = peers, message.setup.degrees
                    peers.enter_mesh(message.setup.degrees)
                else:
                    self._reply(self._load(message, peers, peers.place))
            case m.Unload():
                self._unload()
                self._reply(m.Unloaded(self.settings.rank))
            case BaseException():  # of the outbox's thread
                raise message
            case _:
                raise m.BadMessage(f"{type(message).__name__} is not for a rank")

    def _load(self, message: m.Load, peers: Peers, place: int) -> m.Loaded:
        """Load the rank's part of a model. `peers`: the model's ranks. `place`: this rank's number among them."""
        self._threads[self._model] = message.threads or self.settings.threads
        self._use_threads(self._threads[self._model])
        stage = LoadedStage(place, self.device, message, self._report, peers, self.heartbeat, self.copies)
        self.engines[self._model] = loaded = self._engine(message, stage)
        names, held = parameter_names(loaded.stage.model), loaded.residency
        return m.Loaded(self.settings.rank, held.device_bytes, names, held.host_bytes)

    def _engine(self, message: m.Load, stage: LoadedStage) -> Engine:
        return Engine(self.settings.rank, message, stage)

    def _use_threads(self, threads: int) -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _probe(self, message: m.Probe) -> m.Probed:
        checkpoint = open_own_class(Path(message.path), message.own_class)
        return probe(self.settings.rank, checkpoint, self.device, message.dtype, message.calls)

    def _reply(self, message: Any) -> None:
        """Answer the present request."""
        self.channel.send(message, self._request_id)

    def _report(self, fraction: float) -> None:
        """Tell the client the fraction of the weights that is loaded. Called before each weight."""
        self.heartbeat.done()
        if fraction == 0.0 or fraction - self._reported >= REPORT_STEP:
            self._reported = fraction
            self.channel.send(m.Loading(self.settings.rank, fraction), model=self._model)

    def _begin_vae(self, message: m.BeginVAE) -> m.VAEBegun:
        if self.vae is None or self.vae.name != message.name:
            missing = max(0, message.weight_bytes + message.bytes_needed - free_bytes(self.device))
            return m.VAEBegun(self.settings.rank, False, missing)
        self._turn_to(None)
        return self.vae.begin(message)

    def _turn_to(self, engine: Engine | None) -> None:
        """Finish another model's transfers. To be called before transfers of `engine`'s groups, or of other groups if it is
        None. From then on the rank computes with the threads of `engine`'s model, which the present message is for."""
        if engine is self._newest:
            return
        # NCCL may deadlock if transfers of two groups are in progress and ranks' devices begin them in different orders.
        if self._newest is not None:
            self._newest.rest()
        self._newest = engine
        if engine is not None:
            self._use_threads(self._threads.get(self._model, self.settings.threads))

    def _read_memory(self) -> m.DeviceMemoryReport:
        """Return the device's memory, with the share of the model that the present message is for."""
        for each in self.engines.values():
            each.stage.expanded.drop()
        engines = self.engines.items()
        sizes = {number: each.residency.device_bytes + each.stage.adapters.nbytes for number, each in engines}
        of_model = sizes.pop(self._model, 0)
        # A run of another model that is open keeps its K/V buffers, which this model cannot have.
        others = sum(sizes.values()) + sum(self.engines[number].run_bytes for number in sizes)
        vae = 0 if self.vae is None else self.vae.nbytes
        engine = self.engines.get(self._model)
        taken = 0 if engine is None else engine.take_working_bytes()
        return replace(self.copies.memory(self.settings.rank, of_model, others, vae), working_bytes=taken)

    def _set_resident(self, message: m.SetResident) -> m.Residency:
        engine = self.engines.get(self._model)
        if engine is None:  # unloaded meanwhile
            return m.Residency(self.settings.rank, 0, 0)
        held = engine.set_resident(message.resident[engine.stage.rank])
        self._release_unused()
        return held

    def _unload(self) -> None:
        """Free the model that the present message is for. A message that names no model frees all models, and the VAE's
        part."""
        self._turn_to(None)
        for number in [number for number in self.engines if self._model in (None, number)]:
            self.engines.pop(number).close()
            self._threads.pop(number, None)
        for number in [number for number in self._outside if self._model in (None, number)]:
            peers, degrees = self._outside.pop(number)
            peers.leave_mesh(degrees)
        if self._model is None:
            self.vae = None
        self.channel.return_segments(self._model)
        self._free()

    def _free(self) -> None:
        """Return the memory of objects that have just been dropped."""
        gc.collect()  # engine and model refer to each other: without this the old weights would stay beside the new ones
        self._release_unused()

    def _release_unused(self) -> int:
        """Return unused memory to the driver or the system. Returns its bytes; 0 on a CPU, because they are unknown."""
        if self.device.type != "cuda":
            give_back()
            return 0
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self.device)

    def _next(self) -> Any:
        """Return the next message. From now on `_reply` answers it."""
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
        """Return the next message, if it has arrived and is a micro-step of the same model."""
        if not self._ahead:
            try:
                self._ahead.append(self._inbox.get_nowait())
            except queue.Empty:
                return None
        message, _, model = self._ahead[0]
        return message if isinstance(message, m.Step) and model == self._model else None

    def _read(self) -> None:
        """Receive messages into the inbox. Every error ends the process, because the main thread may be blocked in a
        transfer."""
        try:
            while True:
                self._inbox.put(self.channel.receive())
        except (EOFError, OSError) as error:  # the client is gone
            log.info("rank %d: control connection ended (%s)", self.settings.rank, error)
            if isinstance(self.settings.rendezvous, Path):
                shutil.rmtree(self.settings.rendezvous.parent, ignore_errors=True)
            os._exit(0)
        except BaseException as error:  # a rank that cannot receive would go on sending heartbeats
            summary, text = f"{type(error).__name__}: {error}"[:LONGEST_TEXT], traceback.format_exc()[-LONGEST_TEXT:]
            with contextlib.suppress(OSError):
                self.channel.send(m.Failure(self.settings.rank, READING, False, summary, text))
            os._exit(1)


def run(settings: RankSettings, connection: Connection, make_worker: Callable[..., Worker] | None = None) -> None:
    """Run a rank: join the other ranks, serve, and report errors. `make_worker`: called in place of Worker."""
    device, heartbeat = torch.device(settings.device), Heartbeat()
    channel = Channel(connection, borrowed=functools.partial(pin, device=device))
    beating = (heartbeat, settings.rank, channel, settings.heartbeat_seconds)
    threading.Thread(target=send_heartbeats, args=beating, name="heartbeat", daemon=True).start()

    def fail(error: BaseException) -> None:
        """Report the error and end the process. May be called from any thread, because the main one may be blocked
        forever."""
        summary, peer, transport = f"{type(error).__name__}: {error}", isinstance(error, PeerError), ""
        if isinstance(error, LinkError):
            summary, peer, transport = str(error), True, error.backend
        text = "".join(traceback.format_exception(error))[-LONGEST_TEXT:]
        log.info("rank %d: %s", settings.rank, text)  # also in the log: a report in the middle of a message is unreadable
        with contextlib.suppress(OSError):  # the client is gone
            channel.send(m.Failure(settings.rank, heartbeat.doing, peer, summary[:LONGEST_TEXT], text, transport))
        # The process group is not destroyed: that could wait for the other ranks, which the client is about to end.
        channel.close()
        os._exit(1)

    try:
        write_settings(settings.torch_settings)
        torch.set_num_threads(bind_to_gpu(settings.device, settings.devices, settings.threads))
        if settings.device.startswith("cuda"):
            torch.cuda.set_device(settings.device)
        else:
            keep_freed()
        heartbeat.memory = functools.partial(device_memory, device)
        rendezvous = Rendezvous(settings.rendezvous, len(settings.devices), settings.timeout)
        peers = Peers(settings, rendezvous, Guard(heartbeat, rendezvous.check, fail))
        peers.join()
        (make_worker or Worker)(settings, channel, heartbeat, peers).serve()
        leave()
    except BaseException as error:  # also SystemExit, which a library may raise
        fail(error)
