"""NCCL between ranks that share one GPU: its transports between the GPUs of one machine, by NCCL 2.30.7 and newer."""

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from parallel_backend.wire.rank_settings import P2P_DISABLE, RankSettings

NEEDED = (2, 30, 7)
HOW = {"shm": {P2P_DISABLE: "1"}, "p2p": {}}
"""Transport -> what has NCCL take it."""


def version() -> tuple[int, ...]:
    """Of the NCCL that this process runs."""
    return tuple(torch.cuda.nccl.version())


def lacks() -> str:
    """Why ranks cannot share a GPU here. Empty: they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    wanted, found = (".".join(map(str, each)) for each in (NEEDED, version()))
    return "" if version() >= NEEDED else f"NCCL {found} has no ranks that share a GPU: {wanted} is needed"


def environment(how: str) -> dict[str, str]:
    return HOW[how] | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


def nccl(_devices: tuple[str, ...]) -> str:
    """In place of process_group.backend_for, which takes Gloo for ranks that share a GPU."""
    return "nccl"


def main(how: str, settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main."""
    os.environ.update(environment(how) | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM"})
    from parallel_backend.rank.comm import peers, process_group
    from parallel_backend.rank.start import entry

    for module in (peers, process_group):
        module.backend_for = nccl
    entry.main(settings, connection)


def two(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in the second of two processes that share the GPU and are joined by NCCL. It is called with
    the process's number and `arguments`."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with TemporaryDirectory() as folder:
        given = [(number, Path(folder) / "store", answers, function, arguments) for number in range(2)]
        processes = [context.Process(target=_one_of_two, args=each, daemon=True) for each in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"a process ended with {failed[0]}")
    return answers.get()


def _one_of_two(number: int, store: Path, answers: Any, function: Callable[..., Any], arguments: tuple) -> None:
    os.environ.update(environment("shm"))
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", store=dist.FileStore(str(store), 2), rank=number, world_size=2, timeout=timedelta(seconds=20)
    )
    answer = function(number, *arguments)
    if number:
        answers.put(answer)
    dist.destroy_process_group()
