"""One end of the control connection between the client and a rank.

On one machine the connection is an inherited pipe, which only the pool's child processes have. Other machines: tcp.py.
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
"""Largest frame of a tensor's bytes. It also limits the size of one read, even if a frame claims to be longer."""
HANDLE_FOLLOWS = b"\0"
"""The one byte that is sent together with a segment's file handle."""


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


Borrowed = Callable[[torch.Tensor], Callable[[], None] | None]
"""Function that is called on the receiving thread with the memory of a new segment that this end reads. It returns a
function, which `return_segment` calls, or None."""


class Channel:
    """Sends and receives messages. `send` may be called from any thread, `receive` from one thread only.

    `lends`: the other end is a process of this machine, so tensors can be shared with it in memory. `borrowed` is called for
    each segment that the other end shares with this end; None: this end accepts no segments.
    """

    def __init__(self, connection: Connection, lends: bool = False, borrowed: Borrowed | None = None):
        self.connection, self.lends = connection, lends
        self.begun = 0
        """The number of messages that may have been written, at least in part."""
        self._sending = threading.Lock()
        self._lent: dict[int, Segment] = {}
        self._borrowed: dict[int, Segment] = {}
        self._on_borrowed = borrowed
        self._let_go: dict[int, Callable[[], None] | None] = {}  # by borrowed segment, what `borrowed` returned
        self._models: dict[int, int | None] = {}  # by borrowed segment, the model whose messages use it

    def send(self, message: Any, request_id: int | None = None, model: int | None = None) -> None:
        """Send a message. Raises OSError if the other end is gone, AssertionError if the object is not a message.

        `request_id`, `model`: see Envelope. The message is encoded completely before any byte is written. An error during
        writing closes the connection in this direction, because the other end would read the next message as the missing
        bytes.
        """
        with self._sending:
            self._send(message, request_id, model)

    def lend(self, segment: Segment, model: int | None = None) -> None:
        """Share a segment with the other end. Later messages can refer to its tensors, which must not change while they are
        in use. `model`: the segment is returned together with this model, see `return_segments`. Raises as `send` does."""
        assert self.lends, "the other end is not on this machine"
        with self._sending:
            with self._whole():  # no other message may come between OpenSegment and the handle
                assert segment.handle is not None, "it is closed"
                self._send(OpenSegment(segment.number, segment.nbytes), model=model)
                with socket_of(self.connection) as ours:
                    socket.send_fds(ours, [HANDLE_FOLLOWS], [segment.handle])
            self._lent[segment.number] = segment

    def drop(self, number: int) -> None:
        """Announce that no later message refers to the segment; earlier messages still may. Raises as `send` does."""
        with self._sending:
            if self._lent.pop(number, None) is not None:  # None: `lend` failed, since the other end was gone
                self._send(DropSegment(number))

    def forget(self, number: int) -> None:
        """Like `drop`, but without a message, because the other end drops its segments by itself. Never blocks."""
        self._lent.pop(number, None)

    def _send(self, message: Any, request_id: int | None = None, model: int | None = None) -> None:
        header, tensors = encode(message, request_id, self._lent.values(), model)
        contents = [_bytes(tensor) for tensor in tensors]  # before anything is written: this may raise
        with self._whole():
            self.begun += 1
            self.connection.send_bytes(header)
            for content in contents:
                for start in range(0, len(content), FRAME_BYTES):
                    self.connection.send_bytes(content[start : start + FRAME_BYTES])

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Context in which one message is written. An error in it closes the connection in this direction."""
        try:
            yield
        except BaseException:  # a KeyboardInterrupt too
            stop_sending(self.connection)
            raise

    def receive(self) -> Envelope:
        """Wait for the next message and return it. Raises EOFError or OSError if the other end is gone, BadMessage for other
        bytes. After a BadMessage nothing more can be received, because it is unknown where the next message begins."""
        while True:
            envelope = self._receive()
            if self._on_borrowed is None or not isinstance(envelope.message, OpenSegment):
                return envelope
            self._borrow(envelope.message, envelope.model, self._on_borrowed)

    def return_segments(self, model: int | None = None) -> None:
        """Return the segments that were lent for `model`, or for any model: their tensors are no longer read. Segments
        without a model stay open until the other end sends DropSegment."""
        for number, owner in list(self._models.items()):
            if owner is not None and model in (None, owner):
                self.return_segment(number)

    def _borrow(self, message: OpenSegment, model: int | None, on_borrowed: Borrowed) -> None:
        if message.number in self._borrowed or len(self._borrowed) == MAX_SEGMENTS or message.nbytes > MAX_SEGMENT_BYTES:
            raise BadMessage(f"segment {message.number}: {message.nbytes} bytes, {len(self._borrowed)} segments are open")
        try:
            segment = open_segment(message, self._handle())
        except (ValueError, OSError) as error:
            raise BadMessage(f"a segment of shared memory that cannot be opened: {error}") from error
        self._let_go[message.number] = on_borrowed(segment.memory)
        self._borrowed[message.number], self._models[message.number] = segment, model

    def return_segment(self, number: int) -> None:
        """Return a borrowed segment. Must be called on the thread that computes with its tensors."""
        if self._borrowed.pop(number, None) is not None:
            self._models.pop(number, None)
            if (let_go := self._let_go.pop(number)) is not None:
                let_go()

    def _handle(self) -> int:
        with socket_of(self.connection) as ours:
            content, handles, _, _ = socket.recv_fds(ours, len(HANDLE_FOLLOWS), 1)
        if not content:
            raise EOFError
        if len(handles) != 1:
            raise BadMessage("a segment's handle is missing")
        return handles[0]

    def _receive(self) -> Envelope:
        envelope, pending = decode_header(self._frame(MAX_HEADER_BYTES), self._borrowed)
        for tensor, shape, nbytes in pending:
            for start in range(0, nbytes, FRAME_BYTES):
                length = min(FRAME_BYTES, nbytes - start)
                frame = self._frame(length)
                if len(frame) != length:
                    raise BadMessage(f"{len(frame)} bytes of a tensor instead of {length}")
                if not start:
                    content = self._room(tensor, shape)
                content[start : start + length] = frame
        return envelope

    @property
    def sending(self) -> bool:
        """Whether a thread is in `send` now, which blocks while the other end reads nothing."""
        return self._sending.locked()

    def close(self) -> None:
        """Close the connection. If the other end is gone, a `send` in progress fails at once; `close` waits for it."""
        idle = self._sending.acquire(timeout=CLOSE_SECONDS)
        self.connection.close()
        if idle:
            self._sending.release()

    def _frame(self, limit: int) -> bytes:
        try:
            return self.connection.recv_bytes(limit)
        except OSError as error:
            if not self.connection.closed and not self.connection.readable:  # a longer frame came
                raise BadMessage(f"a frame of more than {limit} bytes") from error
            raise

    @staticmethod
    def _room(tensor: torch.Tensor, shape: list[int]) -> memoryview:
        """Allocate the tensor when its first bytes arrive, so that a header without bytes cannot use up memory."""
        try:
            return _bytes(tensor.resize_(shape))
        except RuntimeError as error:
            raise BadMessage(f"there is no memory for a tensor of the shape {shape}") from error
