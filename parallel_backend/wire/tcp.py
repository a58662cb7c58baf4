"""Control connections over TCP, for ranks on other machines. Each end proves to the other that it knows the pool's key.

The proof is that of multiprocessing.connection: an HMAC of random bytes, in both directions. Nothing is ever unpickled.
"""

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

log = logging.getLogger(__name__)

HELLO = struct.Struct("!II")
"""A rank's first frame after the proof: its rank number and process id."""
HANDSHAKE_SECONDS = 10.0
MAX_UNAUTHENTICATED = 32
"""Maximum number of callers without a proof at a time. Further callers wait."""
DIAL_SECONDS = 60.0
"""Time limit of dialling, proofs included. A rank may have to wait until silent connections are closed."""
LOOK_SECONDS = 0.1
WARNING_SECONDS = 1.0
"""Minimum time between two warnings: a stranger may call thousands of times."""
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept(2) where the system has no room for a connection now."""


@dataclass(frozen=True)
class Peer:
    """A rank that has connected."""

    pid: int
    """Process id on the rank's machine."""
    connection: Connection


def dial(address: tuple[str, int], key: bytes, rank: int) -> Connection:
    """The rank's end of its control connection.

    AuthenticationError if the other end does not know the key, OSError if there is none, TimeoutError after DIAL_SECONDS.
    """
    late = TimeoutError(f"ComfyUI at {address[0]}:{address[1]} did not answer within {DIAL_SECONDS:.0f} s")
    deadline = time.monotonic() + DIAL_SECONDS
    try:
        caller = socket.create_connection(address, DIAL_SECONDS)
    except TimeoutError as error:
        raise late from error
    caller.settimeout(None)
    connection = Connection(caller.detach())
    try:
        with _time_limit(connection, deadline - time.monotonic()) as passed:
            try:
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                _without_delay(connection)
                connection.send_bytes(HELLO.pack(rank, os.getpid()))
            except (EOFError, OSError) as error:
                if passed.is_set():
                    raise late from error
                raise
    except BaseException:
        connection.close()
        raise
    return connection


class Listener:
    """Accepts the ranks of one pool, each once. Listens at `address` until it is closed."""

    def __init__(self, host: str, key: bytes, world: int):
        self._key, self._world = key, world
        self._callers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        self._strangers = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._closed = False
        self._warned, self._unsaid = -WARNING_SECONDS, 0  # when the last warning was given, and how many were not since
        self._full = ""  # the last error of accept(2)
        self._socket = socket.create_server((host, 0), backlog=world + MAX_UNAUTHENTICATED)
        self._socket.settimeout(LOOK_SECONDS)
        self.address: tuple[str, int] = self._socket.getsockname()

    def receive(self, seconds: float, look: Callable[[], None]) -> list[Peer]:
        """All ranks, in rank order, once the last has connected. The caller closes their connections.

        `look` is called meanwhile, and raises to give up. TimeoutError names the ranks that are missing after `seconds`.
        Where this process or the machine has no room for a connection, the callers wait until there is some.
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
                raise TimeoutError(f"no word from rank {', '.join(missing)} within {seconds:.0f} s{self._full}")
            if not self._strangers.acquire(timeout=LOOK_SECONDS):
                continue
            if (caller := self._accept()) is None:
                self._strangers.release()
                continue
            threading.Thread(target=self._greet, args=caller, name="parallel-dit dial", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and close connections that `receive` has not returned. Idempotent."""
        self._socket.close()
        with self._lock:
            self._closed = True
            callers, self._callers = self._callers, {}
        for caller in callers.values():
            caller.connection.close()

    def _accept(self) -> tuple[socket.socket, tuple[str, int]] | None:
        """The next caller and its address. None if there is none for LOOK_SECONDS, or no room for one."""
        try:
            caller = self._socket.accept()
        except (TimeoutError, ConnectionAbortedError):  # it may have gone meanwhile
            return None
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._full = (
                f": a connection could not be accepted ({error.strerror}; `ulimit -n` shows how many files may be open)"
            )
            self._warn(f"Parallel DiT: a rank's connection has to wait: {error.strerror}")
            time.sleep(LOOK_SECONDS)  # else this would be tried without a pause, since the caller still waits
            return None
        self._full = ""
        return caller

    def _warn(self, text: str) -> None:
        """Log the text, once in WARNING_SECONDS at most."""
        with self._lock:
            now = time.monotonic()
            if now - self._warned < WARNING_SECONDS:
                self._unsaid += 1
                return
            unsaid, self._warned, self._unsaid = self._unsaid, now, 0
        log.warning("%s%s", text, f" (and {unsaid} more like it or others)" if unsaid else "")

    def _greet(self, stranger: socket.socket, address: tuple[str, int]) -> None:
        """Main function of a thread for one caller. The time limit ends a silent caller, so that others get a place."""
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
            self._warn(f"Parallel DiT: a connection from {address[0]} to the ranks' port was refused: {error!r}")
            connection.close()
        finally:
            self._strangers.release()


@contextlib.contextmanager
def _time_limit(connection: Connection, seconds: float) -> Iterator[threading.Event]:
    """Context that the connection's shutdown ends with an error in it after `seconds`; then the event is set."""
    passed = threading.Event()

    def end() -> None:
        passed.set()
        shutdown(connection)

    alarm = threading.Timer(max(0.0, seconds), end)
    alarm.daemon = True
    alarm.start()
    try:
        yield passed
    finally:
        alarm.cancel()


def is_closed(connection: Connection) -> bool:
    """Whether the other end has closed the connection, and all its bytes have been read. Never waits."""
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
    """Shut the connection down in this direction. The other end's messages still arrive."""
    with contextlib.suppress(OSError), socket_of(connection) as ours:  # OSError: it has ended already, or is no socket
        ours.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The socket under a connection, which still owns it. OSError if it is closed."""
    lent = socket.socket(fileno=connection.fileno())
    try:
        yield lent
    finally:
        lent.detach()


def _without_delay(connection: Connection) -> None:
    """Switch off Nagle's algorithm, by which a message's second frame waits for the acknowledgement of the first."""
    with socket_of(connection) as ours:
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
