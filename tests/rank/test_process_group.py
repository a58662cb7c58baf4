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


def nccl2_device(rank: int) -> torch.device:
    """The GPU that torch's class since 2.15 takes: by torch's own function where it has one."""
    function = getattr(c10d, "_nccl2_device", None)
    if function is None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    group = SimpleNamespace(bound_device_id=None)
    options = SimpleNamespace(enable_reconfigure=False, process_group=group, global_ranks_in_group=[], group_rank=rank)
    return function(options)


@pytest.mark.parametrize(
    ("devices", "rank", "wrong"),
    [
        (("cuda:0", "cuda:1"), 1, None),
        (("cuda:1", "cuda:0"), 0, "cuda:0"),
        (("ray:cuda", "ray:cuda"), 0, None),
    ],
)
def test_a_communicator_on_another_gpu_than_the_rank_is_refused(environment, monkeypatch, devices, rank, wrong):
    world = SimpleNamespace(bound_device_id=None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(process_group, "backend_for", lambda _devices: "nccl")
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(process_group.dist, "group", SimpleNamespace(WORLD=world))
    with fake_cuda.fake_cuda(*[fake_cuda.ADA] * 3):
        torch.cuda.set_device(process_group.in_its_process(devices[rank]))
        join(rank, devices)  # not bound to a GPU
        world.bound_device_id = nccl2_device(rank)
        environment[process_group.NEW_NCCL] = "1"  # by the user's own choice
        if wrong is None:
            join(rank, devices)
        else:
            with pytest.raises(process_group.CardError, match=f"devices: .* run on {devices[rank]}, .* on {wrong}. Unset"):
                join(rank, devices)


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
