"""Emulated devices in rank processes: what a fork server imports, so that the ranks which it forks have them.

`VARIABLE` in the environment names a folder, which has the names of the cards. Importing this module where it is set gives
the process the devices for life.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed

from testing import fake_cuda, fork_server

from . import process_nccl
from .cuda import emulated
from .machine import Machine

VARIABLE = "PARALLEL_DIT_EMULATED_GPUS"


@contextlib.contextmanager
def emulated_everywhere(folder: Path, *cards: str) -> Iterator[Machine]:
    """As `emulated`, by the cards' names in fake_cuda, also in the ranks that fork servers of this process start."""
    (folder / "cards").write_text(" ".join(cards))
    preloaded = (*fork_server.IMPORTS, __name__)
    with (
        mock.patch.dict(os.environ, {VARIABLE: str(folder)}),
        mock.patch.object(fork_server, "IMPORTS", preloaded),
        mock.patch.object(torch.distributed, "is_nccl_available", process_nccl.is_nccl_available),
        mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 28, 9)),
        emulated(*map(_card, cards), folder=folder) as machine,
    ):
        yield machine


def _card(name: str) -> fake_cuda.Card:
    card = getattr(fake_cuda, name, None)
    assert isinstance(card, fake_cuda.Card), f"no card is called {name}"
    return card


_for_life = contextlib.ExitStack()
if VARIABLE in os.environ and not torch.cuda.is_available():
    _folder = Path(os.environ[VARIABLE])
    _for_life.enter_context(emulated(*map(_card, (_folder / "cards").read_text().split()), checks=False, folder=_folder))
    torch.distributed.is_nccl_available = process_nccl.is_nccl_available
    torch.distributed.init_process_group = process_nccl.init_process_group
