"""Ranks whose compiler hands back the graph that it is given: all of torch.compile but the code, which takes long."""

import time
from multiprocessing.connection import Connection

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings

SLOW = 1.5


def as_it_is(graph, _inputs):
    """In the place of Inductor's compile_fx."""
    return graph.forward


def slowly(graph, _inputs):
    time.sleep(SLOW)
    return graph.forward


def _run(settings: RankSettings, connection: Connection, compile_fx) -> None:
    import torch._inductor.compile_fx

    torch._inductor.compile_fx.compile_fx = compile_fx
    main(settings, connection)


def tracing(settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main."""
    _run(settings, connection, as_it_is)


def tracing_slowly(settings: RankSettings, connection: Connection) -> None:
    _run(settings, connection, slowly)
