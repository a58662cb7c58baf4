"""Sends a rank's outputs to the client, while the rank's main thread starts the next micro-step on the device."""

import queue
import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from parallel_backend.core.device_copies import host_buffer, page_locked
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.sampling import Output


class Outbox:
    """Sends outputs to the client, in the order of `send`.

    A CUDA device computes an output some time after its kernels were launched. The main thread only starts the copy to the
    host; the outbox's thread waits for it and sends the message. On other devices `send` sends it at once.
    """

    def __init__(self, channel: Channel, device: torch.device, failed: Callable[[BaseException], None]):
        """`failed`: called on the outbox's thread with an error of the device or channel, after which the thread ends."""
        self._channel, self._device, self._failed = channel, device, failed
        self._queue: queue.SimpleQueue[tuple[Output, torch.cuda.Event, int | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="outputs", daemon=True)

    def send(self, output: Output, model: int | None) -> None:
        """Send an output. `model`: see wire.encoding.Envelope. To be called on the thread whose current stream computes
        it."""
        if not page_locked(self._device):
            self._channel.send(output, model=model)
            return
        if self._thread.ident is None:
            self._thread.start()
        source = output.value.detach().contiguous()
        copy = host_buffer(source.shape, source.dtype, self._device).copy_(source, non_blocking=True)
        # It blocks: a thread that spins until the copy is over would take the core that launches the next kernels.
        copied = torch.cuda.Event(blocking=True)
        copied.record()
        self._queue.put((replace(output, value=copy), copied, model))

    def close(self) -> None:
        """Wait until all outputs have been sent."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _send_all(self) -> None:
        try:
            torch.cuda.set_device(self._device)  # a thread begins with device 0, where a wait would create a context
            while (entry := self._queue.get()) is not None:
                output, copied, model = entry
                copied.synchronize()
                self._channel.send(output, model=model)
        except BaseException as error:  # the main thread may be waiting for a message that never comes
            self._failed(error)
