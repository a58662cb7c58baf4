"""Ranks that are forked from a process with all imports done, which take a rank 11 s of a core."""

import contextlib
import multiprocessing.util
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from unittest import mock

import torch.multiprocessing

IMPORTS = (
    "diffusers.quantizers.gguf.utils",
    "parallel_backend.rank.worker",
    "parallel_backend.rank.stage.lora",
    "parallel_backend.rank.block_probe",
    "testing.vae_class",
)
"""All that a rank imports until it has loaded a model and a decoder."""


@contextlib.contextmanager
def fork_server() -> Iterator[BaseContext]:
    """What starts such ranks; they have the environment of the first start from it.

    A process has one such server: another one that it had before ends.
    """
    multiprocessing.util.get_temp_dir()  # the server's, wherever a test has temporary files go later
    context = torch.multiprocessing.get_context("forkserver")
    end_server()
    context.set_forkserver_preload(list(IMPORTS))
    try:
        yield context
    finally:
        end_server()


def end_server() -> None:
    """End this process's fork server, if it has one, by force: by itself it would wait for ranks that a test has left."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


def started_by(context: BaseContext) -> contextlib.AbstractContextManager:
    """Context in which the ranks of pools are started by `context` instead of spawned."""
    return mock.patch.object(torch.multiprocessing, "get_context", lambda _method: context)


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Context in which the ranks of pools are started by a new fork server."""
    with fork_server() as context, started_by(context):
        yield
