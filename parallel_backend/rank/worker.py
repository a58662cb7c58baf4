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
from parallel_backend.rank.vae.decoder import BandedDecoder
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.heartbeat import Heartbeat, send_heartbeats
from parallel_backend.wire.rank_settings import RankSettings

from .allocator import give_back, keep_freed
from .block_probe import probe
from .engine import Engine
from .free_memory import read_memory
from .pinned import pinning

log = logging.getLogger(__name__)

REPORT_STEP = 0.01
"""Share of a rank's weights from one report of how far loading is to the next."""

REST_SECONDS = 0.2
"""Without a message, beyond the time between the last two, after which a CPU rank returns freed memory. Within a sampler's
run it does not: there messages come at about equal intervals."""

LOADING = "loading"
DOING = {
    **dict.fromkeys((m.Load, m.Probe, m.PutDecoder), LOADING),
    **dict.fromkeys((m.Adapt, m.Rescale, m.Weigh, m.DropAdapters, m.AdaptersSent), "adapting a LoRA"),
    m.PutConditioning: "taking in a prompt",
    m.Decode: "decoding a picture",
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

    def __init__(self, settings: RankSettings, channel: Channel, heartbeat: Heartbeat, peers: Peers):
        self.settings, self.channel, self.heartbeat, self._peers = settings, channel, heartbeat, peers
        self.device = torch.device(settings.device)
        self.engine: Engine | None = None
        self.decoder: BandedDecoder | None = None
        self._inbox: queue.SimpleQueue[m.Envelope] = queue.SimpleQueue()
        self._ahead: list[m.Envelope] = []
        self._request_id: int | None = None  # of the message that is being handled
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
        if self.engine is not None:  # the process group must not end under the last micro-step's send
            self.engine.end_transfers()

    def _handle(self, message: Any) -> None:
        match message:
            case m.Step():
                output = self.engine.step(message, self._upcoming())
                if output is not None:
                    self.channel.send(output)
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
            case m.PutDecoder():
                self._peers.check()
                self.decoder = None  # before the new one is there
                world = len(self.settings.devices)
                self.decoder = BandedDecoder(message, self.settings.rank, world, self.device, self.heartbeat)
            case m.Decode():
                self._reply(self._decode(message))
            case m.OpenRun():
                self.engine.open_run(message)
            case m.ReadMemory():
                held = 0 if self.engine is None else self.engine.weight_bytes + self.engine.stage.adapters.nbytes
                self._reply(read_memory(self.settings.rank, self.device, held))
            case m.ReleaseUnused():
                self._reply(m.UnusedReleased(self.settings.rank, self._release_unused()))
            case m.FindNotFinite():
                nothing = m.NotFiniteFound(self.settings.rank, None, (), ())  # unloaded meanwhile
                self._reply(nothing if self.engine is None else self.engine.find_not_finite(message))
            case m.BeginTimeline():
                self.engine.begin_timeline()
            case m.ReadTimeline():
                self._reply(self.engine.timeline())
            case m.Probe():
                self._unload()
                checkpoint, settings = open_checkpoint(message.path), self.settings
                found = probe(settings.rank, checkpoint, self.device, message.dtype, settings.slowdown, message.rows)
                self._reply(found)
            case m.ProbeLinks():
                self._unload()
                with self._peers.waiting():
                    found = probe_links(self.settings.rank, self.settings.devices, message.sizes)
                self._reply(found)
            case m.Load():
                self._unload()
                slowdown, peers = self.settings.slowdown, self._peers
                self.engine = Engine(self.settings.rank, self.device, message, slowdown, self._report, peers, self.heartbeat)
                names = parameter_names(self.engine.stage.model)
                self._reply(m.Loaded(self.settings.rank, self.engine.weight_bytes, names))
            case m.Unload():
                self._unload()
                self._reply(m.Unloaded(self.settings.rank))
            case _:
                raise m.BadMessage(f"{type(message).__name__} is not for a rank")

    def _reply(self, message: Any) -> None:
        """Answer the request that is being handled."""
        self.channel.send(message, self._request_id)

    def _report(self, fraction: float) -> None:
        """Tell the client how much of the weights is in place. Called before each of them."""
        self.heartbeat.done()
        if fraction == 0.0 or fraction - self._reported >= REPORT_STEP:
            self._reported = fraction
            self.channel.send(m.Loading(self.settings.rank, fraction))

    def _decode(self, message: m.Decode) -> m.Decoded:
        if self.decoder is None or self.decoder.name != message.name:
            return m.Decoded(self.settings.rank, None, False, {})
        return self.decoder.decode(message)

    def _unload(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = self.decoder = None
        self.channel.return_segments()
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
        message, self._request_id = self._ahead.pop(0) if self._ahead else self._wait()
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
        """The next message if it has arrived and is a micro-step."""
        if not self._ahead:
            try:
                self._ahead.append(self._inbox.get_nowait())
            except queue.Empty:
                return None
        message = self._ahead[0].message
        return message if isinstance(message, m.Step) else None

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(self.channel.receive())
        except (EOFError, OSError, m.BadMessage) as error:
            # The client is gone, or what comes is not from it. The main thread may be blocked in a transfer that will
            # never end, so the process ends here.
            if isinstance(error, m.BadMessage):
                with contextlib.suppress(OSError):
                    summary = f"{type(error).__name__}: {error}"
                    self.channel.send(m.Failure(self.settings.rank, READING, False, summary, traceback.format_exc()))
                os._exit(1)
            log.info("rank %d: control connection ended (%s)", self.settings.rank, error)
            if isinstance(self.settings.rendezvous, Path):
                shutil.rmtree(self.settings.rendezvous.parent, ignore_errors=True)
            os._exit(0)


def run(settings: RankSettings, connection: Connection) -> None:
    """A rank's whole life: join the others, serve, and report what went wrong."""
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
        Worker(settings, channel, heartbeat, peers).serve()
        leave()
    except BaseException as error:  # also what a library's sys.exit raises
        fail(error)
