"""One rank: a process that does what the client's messages say, in order, until the connection ends."""

import ctypes
import gc
import logging
import os
import queue
import shutil
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from . import messages as m
from .adapters import parameter_names
from .channel import Channel
from .checkpoint import open_checkpoint
from .engine import Engine
from .links import probe_links
from .mesh import join, leave
from .probe import probe
from .rank import RankSettings
from .traffic import PeerError
from .vae.decoder import BandedDecoder

log = logging.getLogger(__name__)

REPORT_STEP = 0.01
"""Share of a rank's weights from one report of how far loading is to the next."""

LOADING = "loading"


class Worker:
    """Receives in a thread of its own, so that a lost client is noticed even in the middle of a transfer."""

    def __init__(self, settings: RankSettings, channel: Channel):
        self.settings, self.channel = settings, channel
        self.device = torch.device(settings.devices[settings.rank])
        self.engine: Engine | None = None
        self.decoder: BandedDecoder | None = None
        self.current = LOADING  # what is under way, in the words of an error
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ahead: list[Any] = []
        self._reported = 0.0

    def serve(self) -> None:
        """Handle messages until Stop. Raises whatever went wrong."""
        threading.Thread(target=self._read, name="control", daemon=True).start()
        self.channel.send(m.Ready(self.settings.rank))
        while not isinstance(message := self._take(), m.Stop):
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case m.Step():
                self.current = f"micro-step {message.seq}"
                output = self.engine.step(message, self._upcoming())
                self.current = LOADING
                if output is not None:
                    self.channel.send(output)
            case m.DropAdapters():
                self.engine.adapters.drop()
            case m.Adapt():
                self.engine.adapters.add(message)
            case m.Rescale():
                self.engine.adapters.rescale(message.scales)
            case m.AdaptersSent():
                self.channel.send(m.Adapted(self.settings.rank, message.run, self.engine.adapted()))
            case m.PutConditioning():
                self.engine.put_conditioning(message)
            case m.DropConditioning():
                self.engine.drop_conditioning(message.id)
            case m.CloseRun():
                self.channel.send(self.engine.close_run(message.run))
            case m.PutDecoder():
                self.decoder = None  # before the new one is there
                self.decoder = BandedDecoder(message, self.settings.rank, len(self.settings.devices), self.device)
            case m.Decode():
                self.channel.send(self._decode(message))
            case m.OpenRun():
                self.engine.open_run(message)
            case m.BeginTimeline():
                self.engine.begin_timeline()
            case m.ReadTimeline():
                self.channel.send(self.engine.timeline(message.run))
            case m.Probe():
                self._unload()
                checkpoint, settings = open_checkpoint(message.path), self.settings
                found = probe(settings.rank, checkpoint, self.device, message.dtype, settings.slowdown, message.rows)
                self.channel.send(found)
            case m.ProbeLinks():
                self._unload()
                self.channel.send(probe_links(self.settings.rank, self.settings.devices, message.sizes))
            case m.Load():
                self._unload()
                self.engine = Engine(self.settings.rank, self.device, message, self.settings.slowdown, self._report)
                names = parameter_names(self.engine.model)
                self.channel.send(m.Loaded(self.settings.rank, self.engine.weight_bytes, names))
            case m.Unload():
                self._unload()
                self.channel.send(m.Unloaded(self.settings.rank))
            case _:
                raise m.BadMessage(f"{type(message).__name__} is not for a rank")

    def _report(self, fraction: float) -> None:
        """Tell the client how much of the weights is in place."""
        if fraction == 0.0 or fraction - self._reported >= REPORT_STEP:
            self._reported = fraction
            self.channel.send(m.Loading(self.settings.rank, fraction))

    def _decode(self, message: m.Decode) -> m.Decoded:
        if self.decoder is None or self.decoder.name != message.name:
            return m.Decoded(self.settings.rank, message.run, None, False, {})
        self.current = "decoding a picture"
        decoded = self.decoder.decode(message)
        self.current = LOADING
        return decoded

    def _unload(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = self.decoder = None
        gc.collect()  # engine and model refer to each other: without this the old weights stay beside the new ones
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif trim := getattr(ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim", None):
            trim(0)  # glibc keeps freed blocks of up to 32 MB, which is what weights are made of, for itself

    def _take(self) -> Any:
        return self._ahead.pop(0) if self._ahead else self._inbox.get()

    def _upcoming(self) -> m.Step | None:
        """The next message if it has arrived and is a micro-step."""
        if not self._ahead:
            try:
                self._ahead.append(self._inbox.get_nowait())
            except queue.Empty:
                return None
        return self._ahead[0] if isinstance(self._ahead[0], m.Step) else None

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(self.channel.receive())
        except (EOFError, OSError, m.BadMessage) as error:
            # The client is gone, or what comes is not from it. The main thread may be blocked in a transfer that will
            # never end, so the process ends here.
            log.info("rank %d: control connection ended (%s)", self.settings.rank, error)
            shutil.rmtree(self.settings.rendezvous.parent, ignore_errors=True)
            os._exit(0)


def run(settings: RankSettings, connection: Connection) -> None:
    """A rank's whole life: join the others, serve, and report what went wrong."""
    torch.set_num_threads(settings.threads)
    channel = Channel(connection)
    worker = None
    try:
        if settings.devices[settings.rank].startswith("cuda"):
            torch.cuda.set_device(settings.devices[settings.rank])
        join(settings.rank, settings.devices, settings.rendezvous, settings.timeout)
        worker = Worker(settings, channel)
        worker.serve()
        leave()
    except Exception as error:
        doing = worker.current if worker is not None else LOADING
        summary = f"{type(error).__name__}: {error}"
        peer = isinstance(error, PeerError)
        channel.send(m.Failure(settings.rank, doing, peer, summary, traceback.format_exc()))
        # No clean-up of the process group: its other ranks are about to be ended, and it could wait for them.
        channel.close()
        os._exit(1)
