"""Control connections over TCP, for ranks on other machines. Each end proves to the other that it knows the pool's key. The
proof is that of multiprocessing.connection: an HMAC of random bytes, in both directions. Nothing is ever unpickled."""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

log = logging.getLogger(__name__)

HELLO = struct.Struct("!II")
"""A rank's first frame after the proof contains its rank number and process id."""
HANDSHAKE_SECONDS = 10.0
MAX_UNAUTHENTICATED = 32
"""Maximum number of callers at a time that have not proved that they know the key. Further callers wait."""
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Peer:
    """A rank that has connected."""

    pid: int
    """The process id on the rank's machine."""
    connection: Connection


def dial(address: tuple[str, int], key: bytes, rank: int) -> Connection:
    """Return the rank's end of its control connection. Waits as long as the other end neither answers nor hangs up. Raises
    AuthenticationError if the other end does not know the key, OSError if nothing listens at `address`."""
    connection = Client(address, authkey=key)
    assert isinstance(connection, Connection)
    _without_delay(connection)
    connection.send_bytes(HELLO.pack(rank, os.getpid()))
    return connection


class Listener:
    """Accepts each of the ranks of one pool once. Listens at `address` until it is closed."""

    def __init__(self, host: str, key: bytes, world: int):
        self._key, self._world = key, world
        self._callers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        self._strangers = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._closed = False
        self._warned = False
        self._socket = socket.create_server((host, 0), backlog=world + MAX_UNAUTHENTICATED)
        self._socket.settimeout(LOOK_SECONDS)
        self.address: tuple[str, int] = self._socket.getsockname()

    def receive(self, seconds: float, look: Callable[[], None]) -> list[Peer]:
        """Return all ranks, in rank order, once the last one has connected. The caller closes their connections.

        `look` is called repeatedly during the wait, and raises an exception to stop it. Raises TimeoutError, which names the
        missing ranks, after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                if len(self._callers) == self._world:
                    callers, self._callers = self._callers, {}
                    self._closed = True
                    return [callers[rank] for rank in range(self._world)]
                missing = [str(rank) for rank in range(self._world) if rank not in self._callers]
            look()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no word from rank {', '.join(missing)} within {seconds:.0f} s")
            if not self._strangers.acquire(timeout=LOOK_SECONDS):
                continue
            try:
                caller = self._socket.accept()
            except (TimeoutError, ConnectionAbortedError):  # it may have gone meanwhile
                self._strangers.release()
                continue
            threading.Thread(target=self._greet, args=caller, name="parallel-dit dial", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and close connections that `receive` has not returned. May be called repeatedly."""
        self._socket.close()
        with self._lock:
            self._closed = True
            callers, self._callers = self._callers, {}
        for caller in callers.values():
            caller.connection.close()

    def _greet(self, stranger: socket.socket, address: tuple[str, int]) -> None:
        """Main function of a thread for one caller. The time limit ends the connection of a silent caller, so that others
        can connect."""
        connection = Connection(stranger.detach())
        try:
            with _time_limit(connection, HANDSHAKE_SECONDS):
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                rank, pid = HELLO.unpack(connection.recv_bytes(HELLO.size))
                _without_delay(connection)
            with self._lock:
                if self._closed or rank >= self._world or rank in self._callers:
                    raise AuthenticationError(f"rank {rank} is not expected")
                self._callers[rank] = Peer(pid, connection)
        except (AuthenticationError, OSError, EOFError, ValueError, AssertionError, struct.error) as error:
            level = logging.INFO if self._warned else logging.WARNING  # a stranger may call thousands of times
            self._warned = True
            log.log(level, "Parallel DiT: a connection from %s to the ranks' port was refused: %r", address[0], error)
            connection.close()
        finally:
            self._strangers.release()


@contextlib.contextmanager
def _time_limit(connection: Connection, seconds: float) -> Iterator[None]:
    """Context in which the connection is shut down after `seconds`, which raises an error in the context."""
    alarm = threading.Timer(seconds, shutdown, (connection,))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def is_closed(connection: Connection) -> bool:
    """Return whether the other end has closed the connection and all its bytes have been read. Never waits."""
    try:
        if not connection.poll(0):
            return False
        with socket_of(connection) as ours:
            return ours.recv(1, socket.MSG_PEEK) == b""
    except OSError:  # closed, or reset
        return True


def shutdown(connection: Connection) -> None:
    """Shut the connection down in both directions. Unlike `close` this wakes a thread that is blocked in it."""
    with contextlib.suppress(OSError), socket_of(connection) as ours:  # OSError: the connection has ended already
        ours.shutdown(socket.SHUT_RDWR)


def stop_sending(connection: Connection) -> None:
    """Shut the connection down in this direction. Messages of the other end still arrive."""
    with contextlib.suppress(OSError), socket_of(connection) as ours:  # OSError: it has ended already, or is no socket
        ours.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def socket_of(connection: Connection) -> Iterator[socket.socket]:
    """Context with the socket of a connection, which continues to own it. Raises OSError if the connection is closed."""
    lent = socket.socket(fileno=connection.fileno())
    try:
        yield lent
    finally:
        lent.detach()


def _without_delay(connection: Connection) -> None:
    """Switch off Nagle's algorithm, which delays a message's second frame until the first is acknowledged."""
    with socket_of(connection) as ours:
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
