"""One end of the control connection between the client and a rank.

On one machine that is an inherited pipe, so only the pool's own children are at the other end. Ranks elsewhere: tcp.py.
"""

import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from .encoding import MAX_HEADER_BYTES, BadMessage, Envelope
from .messages import decode_header, encode

CLOSE_SECONDS = 1.0
FRAME_BYTES = 1 << 20
"""Bytes of a tensor that travel as one frame. No more is read at once, whatever length a frame claims."""


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class Channel:
    """Sends and receives messages. `send` may be called from any thread, `receive` from one only."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any, request_id: int | None = None) -> None:
        """Raises OSError when the other end is gone, AssertionError for what is no message. `request_id`: see Envelope."""
        header, tensors = encode(message, request_id)
        with self._sending:
            self.connection.send_bytes(header)
            for tensor in tensors:
                content = _bytes(tensor)
                for start in range(0, len(content), FRAME_BYTES):
                    self.connection.send_bytes(content[start : start + FRAME_BYTES])

    def receive(self) -> Envelope:
        """Blocks. Raises EOFError or OSError when the other end is gone, BadMessage for bytes that are no message.

        After a BadMessage nothing more can be received: nobody knows where the next message begins.
        """
        envelope, pending = decode_header(self._frame(MAX_HEADER_BYTES))
        for tensor, shape, nbytes in pending:
            for start in range(0, nbytes, FRAME_BYTES):
                length = min(FRAME_BYTES, nbytes - start)
                frame = self._frame(length)
                if len(frame) != length:
                    raise BadMessage(f"{len(frame)} bytes of a tensor where {length} belong")
                if not start:
                    content = self._room(tensor, shape)
                content[start : start + length] = frame
        return envelope

    @property
    def sending(self) -> bool:
        """Whether a thread is inside `send` now, which blocks as long as the other end takes nothing."""
        return self._sending.locked()

    def close(self) -> None:
        """Close the connection, after a send under way has failed. It fails at once if the other end is gone."""
        idle = self._sending.acquire(timeout=CLOSE_SECONDS)
        self.connection.close()
        if idle:
            self._sending.release()

    def _frame(self, limit: int) -> bytes:
        try:
            return self.connection.recv_bytes(limit)
        except OSError as error:
            if not self.connection.closed and not self.connection.readable:  # after a longer one
                raise BadMessage(f"a frame of more than {limit} bytes") from error
            raise

    @staticmethod
    def _room(tensor: torch.Tensor, shape: list[int]) -> memoryview:
        """Allocate the tensor, now that its bytes arrive. Pages that no bytes reach are never touched."""
        try:
            return _bytes(tensor.resize_(shape))
        except RuntimeError as error:
            raise BadMessage(f"there is no memory for a tensor of the shape {shape}") from error
