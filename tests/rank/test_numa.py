"""On which CPU cores the rank of a GPU runs, on a machine with two NUMA nodes that a folder plays."""

import os
import sys
import threading
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_backend.rank import numa, worker
from parallel_backend.wire.rank_settings import RankSettings
from testing import fake_cuda

ALL = set(range(16))
NEAR, FAR = {*range(4), *range(8, 12)}, {*range(4, 8), *range(12, 16)}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(nodes, lists)`: the nodes of cuda:0 and so on, and the core lists of all nodes. The system's folder is made
    up; what the process may use, and is bound to, is in the object's `allowed`."""
    monkeypatch.setattr(numa, "SYSTEM", tmp_path / "sys")
    monkeypatch.setattr(numa, "NVIDIA", tmp_path / "proc")
    monkeypatch.setattr(sys, "platform", "linux")
    seen = SimpleNamespace(allowed=set(ALL))
    plays = SimpleNamespace(
        sched_getaffinity=lambda _thread: set(seen.allowed),
        sched_setaffinity=lambda _thread, cores: setattr(seen, "allowed", set(cores)),
    )
    monkeypatch.setattr(numa, "os", plays)

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def make(nodes: list[int], lists: list[str]) -> SimpleNamespace:
        for number, text in enumerate(lists):
            write(tmp_path / f"sys/devices/system/node/node{number}/cpulist", text)
        for number, node in enumerate(nodes):
            place = f"0000:{0x65 + number:02x}:00.0"
            write(tmp_path / "proc" / place / "information", f"GPU UUID: \t {fake_cuda.ADA.properties(number).uuid}")
            write(tmp_path / f"sys/bus/pci/devices/{place}/numa_node", str(node))
        return seen

    with fake_cuda.fake_cuda(*[fake_cuda.ADA] * 3):
        yield make


LISTS = ["0-3,8-11", "4-7,12-15"]


@pytest.mark.parametrize(
    ("device", "nodes", "lists", "allowed", "cores", "threads"),
    [
        ("cuda:0", [0, 1, 1], LISTS, ALL, NEAR, 5),
        ("cuda:2", [0, 1, 1], LISTS, ALL, FAR, 4),  # two ranks share the node's eight cores
        ("cuda:0", [0, 0, 0], LISTS, ALL, NEAR, 2),
        ("cuda:0", [0, 1, 1], LISTS, NEAR, NEAR, 5),  # bound already, by taskset or a container
        ("cuda:0", [0, 1, 1], LISTS, {0, 1, 4, 5}, {0, 1, 4, 5}, 5),  # some of each node: somebody's choice
        ("cuda:0", [0, 0, 0], ["0-15"], ALL, ALL, 5),  # one node
        ("cuda:0", [], LISTS, ALL, ALL, 5),  # where the GPU is is not known
        ("cpu", [0, 1, 1], LISTS, ALL, ALL, 5),
    ],
)
def test_a_rank_runs_near_its_gpu_and_nowhere_that_it_may_not(machine, device, nodes, lists, allowed, cores, threads):
    seen = machine(nodes, lists)
    seen.allowed = set(allowed)
    assert numa.bind_to_gpu(device, ("cuda:0", "cuda:1", "cuda:2"), 5) == threads
    assert seen.allowed == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_rank_is_bound_before_it_serves(machine, monkeypatch):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    machine([0, 1, 0], [str(second), str(first)])
    monkeypatch.setattr(numa, "os", os)
    found: list[object] = []
    monkeypatch.setattr(worker.torch, "set_num_threads", found.append)
    monkeypatch.setattr(os, "_exit", found.append)  # with it a rank ends after an error
    serving = lambda *_: SimpleNamespace(serve=lambda: found.append(os.sched_getaffinity(0)))  # noqa: E731
    ours, theirs = Pipe()
    settings = RankSettings(("cuda:0",), 7, timedelta(1), rank=0, rendezvous=("", 0))
    thread = threading.Thread(target=worker.run, args=(settings, theirs, serving))
    thread.start()
    thread.join(30)
    ours.close()
    assert found == [1, {second}]
