"""Ranks that attend to their heads in two groups under Ulysses, as CUDA ranks do."""

from multiprocessing.connection import Connection

from parallel_backend.rank import RankSettings, main


def grouping(settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as rank.main."""
    from parallel_backend import attention

    attention.HEAD_GROUPS["cpu"] = 2
    main(settings, connection)
