"""Pools of ranks whose links are slow: by the queue of slow_link.py, or by one of the kernel's."""

import contextlib
import ctypes
import functools
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.comm.process_group import INTERFACE_VARIABLES
from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings

from .slow_link import FULL_SPEED, Switch, slow_down

CLONE_NEWNET = 0x40000000
NAMESPACES, ENDS = ("parallel-dit-0", "parallel-dit-1"), ("pditveth0", "pditveth1")
ADDRESSES = ("10.199.0.1/24", "10.199.0.2/24")
LARGEST_PACKET = 65535
"""Bytes, of a pair of virtual Ethernet devices: so that cores spend no more on a byte than over loopback."""
AT_FIRST = 1e9
"""Bytes a second, while ranks start."""
BURST = 2 * LARGEST_PACKET
"""Bytes that tc lets through at once after a rest. No less will do for such packets."""
QUEUED = 64 << 20
"""Bytes that wait in tc's queue: more than TCP ever has under way, so that nothing is lost."""


def _enter_slow(folder: Path, world: int, settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main."""
    slow_down(folder, world)
    main(settings, connection)


@contextlib.contextmanager
def slow_pool(world: int) -> Iterator[tuple[Pool, Switch]]:
    """Ranks at a switch that is at full speed until it is told otherwise."""
    with TemporaryDirectory(prefix="slow-links-") as directory:
        folder = Path(directory)
        switch = Switch(folder, world)
        switch.set(FULL_SPEED, 0.0)
        start = functools.partial(LocalRanks, entry=functools.partial(_enter_slow, folder, world))
        with contextlib.closing(Pool(("cpu",) * world, threads=1, start=start)) as pool:
            yield pool, switch


def _enter_namespace(settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main: its sockets are in the namespace of its number."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", NAMESPACES[settings.rank]).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ |= dict.fromkeys(INTERFACE_VARIABLES, ENDS[settings.rank])
    main(settings, connection)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Cable:
    """Two network namespaces, joined by a pair of virtual Ethernet devices whose ends each send through tc's queue."""

    def set(self, bytes_per_second: float) -> None:
        """Of each direction."""
        queue = f"root tbf rate {round(8 * bytes_per_second)}bit burst {BURST} limit {QUEUED}".split()
        for space, end in zip(NAMESPACES, ENDS, strict=True):
            _ip("netns", "exec", space, "tc", "qdisc", "replace", "dev", end, *queue)


@contextlib.contextmanager
def cabled_pool() -> Iterator[tuple[Pool, Cable]]:
    """Two ranks, each in a network namespace of its own. Needs root, and a kernel that has veth and tbf (Linux).

    CalledProcessError, with ip's words in `stderr`, where that is not so.
    """
    with contextlib.ExitStack() as stack:
        for space in NAMESPACES:
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
        _ip("link", "add", ENDS[0], "netns", NAMESPACES[0], "type", "veth", "peer", "name", ENDS[1], "netns", NAMESPACES[1])
        cable = Cable()
        for space, end, address in zip(NAMESPACES, ENDS, ADDRESSES, strict=True):
            _ip("-n", space, "link", "set", end, "mtu", str(LARGEST_PACKET))
            _ip("-n", space, "address", "add", address, "dev", end)
            _ip("-n", space, "link", "set", end, "up")
            _ip("-n", space, "link", "set", "lo", "up")
        cable.set(AT_FIRST)
        start = functools.partial(LocalRanks, entry=_enter_namespace)
        yield stack.enter_context(contextlib.closing(Pool(("cpu",) * len(NAMESPACES), threads=1, start=start))), cable
