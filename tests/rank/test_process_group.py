"""The process group of all ranks: which class of torch's it is, on which GPU it transfers, and its variables."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from parallel_backend.rank.comm import process_group
from testing import fake_cuda


@pytest.fixture
def environment(monkeypatch) -> dict[str, str]:
    """`os.environ` of a rank that has not joined yet. What joining adds is taken away again."""
    for name in (*process_group.DEFAULTS, *process_group.RECORDER_VARIABLES, *process_group.INTERFACE_VARIABLES):
        monkeypatch.setenv(name, "removed by the next line")
        monkeypatch.delenv(name)
    return os.environ


def join(rank: int, devices: tuple[str, ...]) -> None:
    rendezvous = SimpleNamespace(address=None, store=torch.distributed.HashStore())
    process_group.join(rank, devices, rendezvous, timedelta(seconds=9))


class Made(Exception):
    """A group of NCCL was about to be made."""


def test_torch_makes_its_class_of_nccl_that_takes_the_gpu_from_the_tensors(environment, monkeypatch):
    """By torch's own choice, whatever its version is: a build without NCCL has the choice too, only not the classes."""

    def planted(name: str) -> type:
        class Class:
            Options = SimpleNamespace

            def __init__(self, *_, **__):
                raise Made(name)

        return Class

    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2"):
        monkeypatch.setattr(c10d, name, planted(name), raising=False)
    for module in (c10d, torch.distributed):
        monkeypatch.setattr(module, "is_nccl_available", lambda: True)
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA), pytest.raises(Made, match=r"^ProcessGroupNCCL$"):
        join(0, ("cuda:1", "cuda:0"))


DEFAULTS = {
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "TORCH_DIST_USE_NCCL2": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}


@pytest.mark.parametrize("name", [*DEFAULTS, process_group.OLD_RECORDER])
def test_a_ranks_variables_are_set_before_the_group_unless_the_user_has(environment, monkeypatch, name):
    seen: dict[str, str] = {}
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **__: seen.update(environment))
    environment[name] = "the user's"
    join(0, ("cpu", "cpu"))
    expected = DEFAULTS | {name: "the user's"}
    if name == process_group.OLD_RECORDER:  # the newer name would take its place
        expected[process_group.RECORDER] = None
    assert {key: seen.get(key) for key in expected} == expected
    assert process_group.DEFAULTS.keys() == DEFAULTS.keys()
