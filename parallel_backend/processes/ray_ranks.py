"""Ranks as actors on a Ray cluster. They run the same code as local ranks; their channels are TCP connections."""

import contextlib
import json
import multiprocessing
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel_backend.core.devices import on_ray
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.rank_settings import StartSettings
from parallel_backend.wire.tcp import Listener, is_closed, shutdown

from .local import LocalRanks, Ranks, clean_main_module, only_ended_by_us, rank_entry
from .pool import RankError
from .ray_driver import RayJob, drive

ROOT = str(Path(__file__).resolve().parents[2])
"""The node pack's folder. It must exist under this path on all machines."""
LOOPBACK = "127.0.0.1"
KEY_BYTES = 32
CONNECT_SECONDS = 60.0
"""Seconds for Ray to start a driver and reach the cluster."""
PLACE_SECONDS = 30.0
"""Seconds for the cluster to get enough free resources, because the actors of an ended pool may still be ending."""
START_SECONDS = 120.0
"""Seconds for the actors to start and connect. They import torch later."""
GRACE_SECONDS = 0.4
"""Seconds for Ray to report why a rank's connection ended."""
END_SECONDS = 2.0
MOST_NEWS = 1 << 20
"""Largest size of a message of the driver in bytes."""


def start_of(devices: tuple[str, ...]) -> Callable[[StartSettings], Ranks]:
    """Return the class that starts ranks on these devices, see pool.Pool."""
    return RayRanks if on_ray(devices[0]) else LocalRanks


class RayRanks:
    """Ranks with one actor each, on the cluster of RAY_ADDRESS, or on the cluster to which this machine belongs.

    The constructor waits until all ranks have connected. It raises ValueError if there is no cluster or no room on it,
    RankError if a rank cannot start. It listens on loopback if all ranks are on this machine, else on its cluster address.
    """

    def __init__(self, start: StartSettings):
        assert all(map(on_ray, start.devices)), start.devices
        self.channels: list[Channel] = []
        self.names, self.logs = start.devices, None
        self._how: dict[int, str] = {}
        self._silent_since: dict[int, float] = {}
        self._pids: tuple[int, ...] = ()
        self._killing = threading.Lock()
        self._reception: Listener | None = None
        self._store: dist.TCPStore | None = None
        context = multiprocessing.get_context("spawn")
        self._news, theirs = context.Pipe()
        job = RayJob(start, rank_entry(), ROOT, PLACE_SECONDS)
        self._driver = context.Process(target=drive, args=(theirs, job), name="parallel-dit ray driver", daemon=True)
        try:
            with clean_main_module():
                self._driver.start()
            only_ended_by_us(self._driver)
            theirs.close()
            self._receive(start)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, each valid on its rank's machine."""
        return self._pids

    @property
    def ends(self) -> Mapping[Any, int]:
        return {}

    def how_ended(self, rank: int) -> str | None:
        self._read_news()
        if rank in self._how:
            return self._how[rank]
        if not is_closed(self.channels[rank].connection):
            return None
        if time.monotonic() - self._silent_since.setdefault(rank, time.monotonic()) < GRACE_SECONDS:
            return None
        return "has gone: its connection ended, and with it its process or its machine"

    def log_tail(self, rank: int) -> str:
        """Return an empty string, because Ray stores the actors' output on their machines."""
        return ""

    def dump(self, rank: int) -> None:
        """Do nothing, because no signal reaches another machine."""

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(is_closed(channel.connection) for channel in self.channels):
            time.sleep(0.02)

    def kill(self) -> None:
        with self._killing:
            for channel in self.channels:
                shutdown(channel.connection)  # a rank ends with its connection, whatever it is doing
            if self._reception is not None:
                self._reception.close()
            self._store = None
            self._news.close()  # the driver notices, and has Ray end the actors that are left
            if self._driver.pid is not None:
                self._driver.join(END_SECONDS)
                if self._driver.is_alive():
                    self._driver.kill()
                    self._driver.join()

    def _receive(self, start: StartSettings) -> None:
        placed = self._placed(CONNECT_SECONDS + PLACE_SECONDS)
        self.names = tuple(f"{name} on {at}" for name, at in zip(start.devices, placed["placed"], strict=True))
        host = LOOPBACK if set(placed["placed"]) == {placed["here"]} else placed["here"]
        key = secrets.token_bytes(KEY_BYTES)
        self._reception = Listener(host, key, len(start.devices))
        listener = socket.create_server((host, 0))  # a store without a listener would listen on every address
        address, port = listener.getsockname()
        self._store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=start.timeout, master_listen_fd=listener.detach()
        )
        ready = {"address": self._reception.address, "rendezvous": (address, port), "key": key.hex()}
        self._news.send_bytes(json.dumps(ready).encode())
        try:
            callers = self._reception.receive(START_SECONDS, self._check_start)
        except TimeoutError as error:
            raise RankError(f"Parallel DiT: {error}. Can the machines of the cluster reach {host}?") from error
        self._reception.close()
        self._pids = tuple(caller.pid for caller in callers)
        self.channels = [Channel(caller.connection) for caller in callers]

    def _placed(self, seconds: float) -> dict[str, Any]:
        """Return the driver's first message: the ranks' machines and this one. Raises ValueError if the cluster refuses the
        ranks."""
        try:
            if not self._news.poll(seconds):
                raise ValueError(f"devices: the Ray cluster did not answer within {seconds:.0f} s. Is it up (ray status)?")
            told = json.loads(self._news.recv_bytes(MOST_NEWS))
        except (EOFError, OSError) as error:
            self._driver.join(END_SECONDS)
            raise RankError(f"Parallel DiT: Ray's driver process ended (exit code {self._driver.exitcode})") from error
        if "refused" in told:
            raise ValueError(told["refused"])
        return told

    def _check_start(self) -> None:
        self._read_news()
        for rank, how in self._how.items():
            raise RankError(f"Parallel DiT: rank {rank} ({self.names[rank]}) {how}")
        if not self._driver.is_alive():
            raise RankError(f"Parallel DiT: Ray's driver process ended (exit code {self._driver.exitcode})")

    def _read_news(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # the driver has ended
            while self._news.poll(0):
                told = json.loads(self._news.recv_bytes(MOST_NEWS))
                self._how[told["ended"]] = told["how"]
