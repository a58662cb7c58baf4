"""Ranks between which a link does not come up, as between consumer cards behind an IOMMU, or that come late to the store."""

import time
from multiprocessing.connection import Connection

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings

HANGS_AT = {"start": "try_pair", "loading": "try_link"}
"""By when it shows: the part of the self-test that hangs."""


def deaf(when: str, settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main: rank 1 takes no part, and the other one is blocked inside of torch."""
    from parallel_backend.rank.comm import peers

    if settings.rank == 1:
        setattr(peers, HANGS_AT[when], lambda *_: time.sleep(3600))
    main(settings, connection)


def deaf_by_nccl(works: str, settings: RankSettings, connection: Connection) -> None:
    """The same at the start, as by NCCL, until ranks talk as `works` says, a transport's name."""
    from parallel_backend.rank.comm import peers

    peers.backend_for = lambda _devices: "nccl"
    if settings.self_test.transport.name != works:
        peers.try_pair = lambda *_: time.sleep(3600)
    main(settings, connection)


def late(settings: RankSettings, connection: Connection) -> None:
    """Rank 1 does not come to join."""
    from parallel_backend.rank.comm import peers

    join = peers.join

    def joining(*arguments) -> None:
        if settings.rank == 1:
            time.sleep(3600)
        join(*arguments)

    peers.join = joining
    main(settings, connection)
