"""NCCL between ranks that share a CUDA device, for machines with one: each rank says that it is a machine of its own.

NCCL refuses two ranks of one machine on one device. By NCCL_HOSTID it takes the ranks for two machines, and sends through
sockets of the loopback interface. Communicators, streams, groups and kernels are those of any run; P2P is not there.
"""

import os
from multiprocessing.connection import Connection

from parallel_backend.wire.rank_settings import RankSettings

HOST = "NCCL_HOSTID"
"""NCCL's environment variable: the name of the machine."""


def backend_for(_devices: tuple[str, ...]) -> str:
    """In place of process_group.backend_for."""
    return "nccl"


def _as_a_machine(settings: RankSettings) -> None:
    from parallel_backend.rank.comm import peers, process_group

    os.environ[HOST] = f"rank {settings.rank}"
    peers.backend_for = process_group.backend_for = backend_for


def main(settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main."""
    from parallel_backend.rank.start import entry

    _as_a_machine(settings)
    entry.main(settings, connection)
