"""The command: all kinds of cases, counted by what came of them."""

import contextlib
import sys
from collections.abc import Iterator

from testing.fork_server import forked_ranks
from tests.wire.test_messages import MESSAGES

from . import messages, ranks
from .runner import Kinds, Make, command, little_memory


@contextlib.contextmanager
def into_rank() -> Iterator[Make]:
    """Ranks are processes of their own, which no limit on this one's memory is meant for."""
    with forked_ranks():
        yield ranks.into_rank(MESSAGES)


KINDS: Kinds = {
    "headers of messages": (0.6, lambda: little_memory(messages.headers(MESSAGES))),
    "streams of messages": (0.3, lambda: little_memory(messages.streams(MESSAGES))),
    "bytes from a rank": (0.08, lambda: little_memory(ranks.into_client(MESSAGES))),
    "bytes to a rank": (0.02, into_rank),
}

if __name__ == "__main__":
    sys.exit(command("python -m tests.campaigns.fuzz", "damaged messages and streams: refused, or read", KINDS))
