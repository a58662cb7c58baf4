"""What a rank's allocator does with freed memory, seen in page faults."""

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from parallel_backend.rank import worker as worker_module
from parallel_backend.rank.worker import Worker
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.rank_settings import RankSettings
from testing.fake_cuda import ADA, GB, fake_cuda

ROOT = Path(__file__).resolve().parents[2]

FAULTS = """
import ctypes, resource
from parallel_backend.rank.allocator import give_back, keep_freed
from tests.support.alone import nobody
SIZE = 24 << 20
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def work():
    held = [libc.malloc(SIZE) for _ in range(4)]
    for block in held:
        libc.memset(block, 1, SIZE)
    while held:
        libc.free(held.pop())
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
{first}
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = resident()
give_back()
print(faults, kept - resident())
"""


def run(first: str) -> tuple[int, int]:
    """(page faults of the second use of the same memory, bytes that were then given back)."""
    code = FAULTS.format(first=first)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    faults, returned = map(int, done.stdout.split())
    return faults, returned


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
@pytest.mark.slow
def test_freed_memory_is_kept_and_given_back_when_asked():
    faults, returned = run("keep_freed()")
    assert faults < 1_000
    assert returned > 90 << 20
    usual, _ = run("")
    assert usual > 10_000  # the control: 96 MiB are 24,576 pages


class Mute:
    def send(self, message: object, request_id: int | None = None, model: int | None = None) -> None:
        pass


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """`worker(device)`: a Worker with a list `given_back`, which grows when its memory is, after little rest."""
    monkeypatch.setattr(worker_module, "REST_SECONDS", 0.01)

    def make(device: str = "cpu") -> Worker:
        made = Worker(
            RankSettings((device,), 1, timedelta(1), rank=0, rendezvous=tmp_path / "store"), Mute(), Heartbeat(), None
        )
        made.given_back, here = [], threading.get_ident()

        def give_back() -> None:
            if threading.get_ident() == here:  # other tests' ranks may be at rest in threads of this process
                made.given_back.append(1)

        monkeypatch.setattr(worker_module, "give_back", give_back)
        return made

    return make


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rank_at_rest_gives_back_once(worker, device):
    """Unless its tensors are elsewhere."""
    made = worker(device)
    made._inbox.put(m.Envelope(m.Unload()))
    assert made._next() == m.Unload()
    assert not made.given_back
    threading.Timer(0.5, made._inbox.put, (m.Envelope(m.Stop()),)).start()
    assert made._next() == m.Stop()
    assert len(made.given_back) == (1 if device == "cpu" else 0)


def test_a_gpu_gets_back_what_the_allocator_kept(worker):
    made = worker()
    made.device = torch.device("cuda:0")
    with fake_cuda(ADA) as cuda:
        cuda.hold(5 * GB)
        cuda.hold(-2 * GB)
        assert made._release_unused() == 2 * GB
        assert cuda.free() == ADA.memory - 3 * GB
