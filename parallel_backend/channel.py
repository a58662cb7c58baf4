"""One end of the control connection between the client and a rank: an inherited pipe, so only the pool's own children
are at the other end."""

import threading
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection
from typing import Any

import torch

from .messages import MAX_HEADER_BYTES, BadMessage, decode_header, encode


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class Channel:
    """Sends and receives messages. `send` may be called from any thread, `receive` from one only."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises OSError when the other end is gone."""
        header, tensors = encode(message)
        with self._sending:
            self.connection.send_bytes(header)
            for tensor in tensors:
                if tensor.numel():
                    self.connection.send_bytes(_bytes(tensor))

    def receive(self) -> Any:
        """Blocks. Raises EOFError or OSError when the other end is gone, BadMessage for bytes that are no message."""
        message, tensors = decode_header(self.connection.recv_bytes(MAX_HEADER_BYTES))
        for tensor in tensors:
            if tensor.numel():
                try:
                    got = self.connection.recv_bytes_into(_bytes(tensor))
                except BufferTooShort as error:
                    raise BadMessage(f"more than {tensor.nbytes} bytes for a tensor") from error
                if got != tensor.nbytes:
                    raise BadMessage(f"{got} bytes for a tensor of {tensor.nbytes}")
        return message

    def close(self) -> None:
        self.connection.close()
