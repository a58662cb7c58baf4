"""Ranks that note what each connection takes of their device when it is opened, for the self-test alone."""

import contextlib
import json
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from parallel_backend.wire.rank_settings import RankSettings

OPENING = ("open_communicator", "try_pair", "try_all_to_all", "try_sum", "try_link")
"""Functions of rank/comm/self_test.py, which open all that a run uses. The last argument of each is the device."""


def main(file: Path, settings: RankSettings, connection: Connection) -> None:
    """Run the rank, in place of entry.main. `file`: see `noted`."""
    from parallel_backend.rank.start import entry

    with noted(file):
        entry.main(settings, connection)


@contextlib.contextmanager
def noted(file: Path) -> Iterator[None]:
    """Within it each opening appends a line of JSON: what it was, and the bytes of its CUDA device outside of torch's
    allocator that it took. All ranks may have one file."""
    from parallel_backend.rank.comm import peers  # in the rank's process alone

    with contextlib.ExitStack() as stack:
        for name in OPENING:
            stack.enter_context(mock.patch.object(peers, name, _noting(name, getattr(peers, name), file)))
        yield


def _noting(name: str, opening: Callable[..., None], file: Path) -> Callable[..., None]:
    def noting(*given: Any) -> None:
        import torch

        device = given[-1]
        if device.type != "cuda":
            opening(*given)
            return

        def outside() -> int:
            free, total = torch.cuda.mem_get_info(device)
            return total - free - torch.cuda.memory_reserved(device)

        before = outside()
        opening(*given)
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps({"what": name, "bytes": outside() - before}) + "\n")

    return noting
