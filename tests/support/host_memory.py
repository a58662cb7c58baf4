"""Host memory of a machine where nothing else runs: models go there to give way, and are unloaded if it is short."""

from unittest import mock

from parallel_backend.core import host_memory

FREE = 64 << 30


def plenty() -> "mock._patch[object]":
    """While entered, ranks of this process have `FREE` bytes, however much other programs have of this machine's memory."""
    return mock.patch.object(host_memory, "_memories", lambda swap: [(FREE, FREE)])
