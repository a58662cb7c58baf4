"""The command: all kinds of cases, counted by what came of them."""

import sys

from tests.wire.test_messages import MESSAGES

from . import messages, ranks
from .runner import Kinds, command, little_memory

KINDS: Kinds = {
    "headers of messages": (0.6, lambda: little_memory(messages.headers(MESSAGES))),
    "streams of messages": (0.3, lambda: little_memory(messages.streams(MESSAGES))),
    "bytes from a rank": (0.1, lambda: little_memory(ranks.into_client(MESSAGES))),
}

if __name__ == "__main__":
    sys.exit(command("python -m tests.campaigns.fuzz", "damaged messages and streams: refused, or read", KINDS))
