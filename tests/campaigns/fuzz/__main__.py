"""The command: all kinds of cases, counted by what came of them."""

import sys

import torch

from tests.wire.test_messages import MESSAGES

from . import messages, ranks
from .model_files import ggufs, own_classes, packed
from .runner import Kinds, command, little_memory
from .verdict import on_threads

KINDS: Kinds = {
    "headers of messages": (0.6, lambda: little_memory(messages.headers(MESSAGES))),
    "streams of messages": (0.3, lambda: little_memory(messages.streams(MESSAGES))),
    "bytes from a rank": (0.1, lambda: little_memory(ranks.into_client(MESSAGES))),
    "own classes": (0.22, lambda: on_threads(own_classes)),
    "quantised": (0.14, lambda: on_threads(packed)),
    "GGUF": (0.04, lambda: on_threads(ggufs)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(command("python -m tests.campaigns.fuzz", "damaged messages, streams and files: refused, or right", KINDS))
