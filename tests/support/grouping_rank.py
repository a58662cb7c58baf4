"""Ranks that attend to their heads in two groups under Ulysses, as CUDA ranks do."""

from multiprocessing.connection import Connection

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings


def grouping(settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main."""
    from parallel_backend.rank.attention import parallel_attention as attention

    attention.HEAD_GROUPS["cpu"] = 2
    main(settings, connection)
