"""One end of the control connection between the client and a rank.

On one machine that is an inherited pipe, so only the pool's own children are at the other end. Ranks elsewhere: tcp.py.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from .encoding import MAX_HEADER_BYTES, BadMessage, Envelope
from .messages import decode_header, encode
from .shared_memory import MAX_SEGMENT_BYTES, MAX_SEGMENTS, DropSegment, OpenSegment, Segment, open_segment
from .tcp import socket_of, stop_sending

CLOSE_SECONDS = 1.0
FRAME_BYTES = 1 << 20
"""Bytes of a tensor that travel as one frame. No more is read at once, whatever length a frame claims."""
HANDLE_FOLLOWS = b"\0"
"""The byte that a segment's handle travels with."""


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


Borrowed = Callable[[torch.Tensor], Callable[[], None]]
"""Is given a segment's memory before it is used, by the thread that receives.

What it returns is called by `return_segment`, when the memory will not be used any more.
"""


class Channel:
    """Sends and receives messages. `send` may be called from any thread, `receive` from one only.

    `lends`: the other end is a process of this machine, and may be given tensors in shared memory. `borrowed`: this end
    takes such tensors; the client does not.
    """

    def __init__(self, connection: Connection, lends: bool = False, borrowed: Borrowed | None = None):
        self.connection, self.lends = connection, lends
        self.begun = 0
        """Messages whose writing has begun, and that may thus have been cut short."""
        self._sending = threading.Lock()
        self._lent: dict[int, Segment] = {}
        self._borrowed: dict[int, Segment] = {}
        self._on_borrowed = borrowed
        self._let_go: dict[int, Callable[[], None]] = {}  # by segment that is borrowed
        self._models: dict[int, int | None] = {}  # by segment that is borrowed, the model whose messages use it

    def send(self, message: Any, request_id: int | None = None, model: int | None = None) -> None:
        """Raises OSError when the other end is gone, AssertionError for what is no message. Others: see Envelope.

        Nothing is written before all of the message is ready to be. If an error cuts the writing short, the other end hears
        no more: the rest of the message would be taken from the next one.
        """
        with self._sending:
            self._send(message, request_id, model)

    def lend(self, segment: Segment, model: int | None = None) -> None:
        """From now on tensors in the segment are not sent, but pointed to. They must not change while they are in use.

        `model`: with which the other end lets it go. Raises as `send`.
        """
        assert self.lends, "the other end is not on this machine"
        with self._sending:
            with self._whole():  # the other end takes the handle for a part of the message
                self._send(OpenSegment(segment.number, segment.nbytes, segment.name), model=model)
                if segment.handle is not None:
                    with socket_of(self.connection) as ours:
                        socket.send_fds(ours, [HANDLE_FOLLOWS], [segment.handle])
            self._lent[segment.number] = segment

    def drop(self, number: int) -> None:
        """No message will point into that segment any more. Raises as `send`.

        The other end lets it go when it comes to it, and may use it until then for what it was sent before.
        """
        with self._sending:
            if self._lent.pop(number, None) is not None:  # the other end may have been gone when it was to be lent
                self._send(DropSegment(number))

    def forget(self, number: int) -> None:
        """As `drop`, without a word: the other end lets its segments go by itself. Never blocks."""
        self._lent.pop(number, None)

    def _send(self, message: Any, request_id: int | None = None, model: int | None = None) -> None:
        header, tensors = encode(message, request_id, self._lent.values(), model)
        contents = [_bytes(tensor) for tensor in tensors]  # all of them now: some tensors have no bytes to give
        with self._whole():
            self.begun += 1
            self.connection.send_bytes(header)
            for content in contents:
                for start in range(0, len(content), FRAME_BYTES):
                    self.connection.send_bytes(content[start : start + FRAME_BYTES])

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Within it one message is written. Cut short, it ends what the other end hears."""
        try:
            yield
        except BaseException:  # a KeyboardInterrupt too
            stop_sending(self.connection)
            raise

    def receive(self) -> Envelope:
        """Blocks. Raises EOFError or OSError when the other end is gone, BadMessage for bytes that are no message.

        After a BadMessage nothing more can be received: nobody knows where the next message begins.
        """
        while True:
            envelope = self._receive()
            if self._on_borrowed is None or not isinstance(envelope.message, OpenSegment):
                return envelope
            self._borrow(envelope.message, envelope.model, self._on_borrowed)

    def return_segments(self, model: int | None = None) -> None:
        """Let the segments go that are borrowed for `model`, or for any: no tensor in them will be read any more.

        Those that are for no model, such as a VAE's output, may be in use: the other end asks them back (DropSegment).
        """
        for number, owner in list(self._models.items()):
            if owner is not None and model in (None, owner):
                self.return_segment(number)

    def _borrow(self, message: OpenSegment, model: int | None, on_borrowed: Borrowed) -> None:
        if message.number in self._borrowed or len(self._borrowed) == MAX_SEGMENTS or message.nbytes > MAX_SEGMENT_BYTES:
            raise BadMessage(f"segment {message.number} of {message.nbytes} bytes beside {len(self._borrowed)} others")
        try:
            segment = open_segment(message, None if message.name else self._handle())
        except (ValueError, OSError) as error:
            raise BadMessage(f"a segment of shared memory that cannot be opened: {error}") from error
        self._let_go[message.number] = on_borrowed(segment.memory)
        self._borrowed[message.number], self._models[message.number] = segment, model

    def return_segment(self, number: int) -> None:
        """Let a segment go that is borrowed. By the thread that computes with it."""
        if self._borrowed.pop(number, None) is not None:
            self._models.pop(number, None)
            self._let_go.pop(number)()

    def _handle(self) -> int:
        with socket_of(self.connection) as ours:
            content, handles, _, _ = socket.recv_fds(ours, len(HANDLE_FOLLOWS), 1)
        if not content:
            raise EOFError
        if len(handles) != 1:
            raise BadMessage("no handle of a segment where one belongs")
        return handles[0]

    def _receive(self) -> Envelope:
        envelope, pending = decode_header(self._frame(MAX_HEADER_BYTES), self._borrowed)
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
