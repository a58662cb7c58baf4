"""Ranks that come up at once, since they import no torch, and then do nothing: entries in the place of entry.main."""

import threading
from multiprocessing.connection import Connection
from pathlib import Path

from parallel_backend.rank.start.parent_watch import end_with_parent
from parallel_backend.wire.rank_settings import RankSettings


def idle(settings: RankSettings, _connection: Connection) -> None:
    """Ends with its parent alone, as a rank does that loads or waits for others."""
    assert isinstance(settings.rendezvous, Path)
    assert settings.log is not None
    settings.log.write_text(f"rank {settings.rank} is here")
    end_with_parent(settings.rendezvous.parent)
    threading.Event().wait()
