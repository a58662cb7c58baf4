"""Ranks as actors on a real Ray cluster: two nodes on this machine, one rank on each."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.cores import usable_cores
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes import ray_ranks
from parallel_backend.processes.pool import Pool, RankError
from parallel_backend.processes.ray_ranks import RayRanks
from parallel_backend.wire.loading import Load
from testing import mini
from testing.models import on_ranks
from tests.processes.test_failures import lose_a_rank, wait_until_gone

pytestmark = [
    pytest.mark.ray,
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the ray package"),
]

ROOT = Path(__file__).resolve().parents[2]
THREADS = max(1, usable_cores() // 2)
"""As many as a rank of two has in `pools`, for the same sums in the same order, and as many as a node has: one rank each."""
DEVICES = ("ray:cpu", "ray:cpu")
NODE = {"num_cpus": THREADS, "object_store_memory": 80 * 2**20}
PLACE = r"ray:cpu on [\d.]+"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """On the loopback interface, with a node beside the head's."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
        cluster.add_node(**NODE)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def living_actors(cluster) -> list[str]:
    actors = cluster.global_state.actor_table(None, None, None)
    return [name for name, actor in actors.items() if actor["State"] != "DEAD"]


@pytest.fixture(scope="module")
def on_ray(cluster, mini_file) -> Iterator[Callable[[Degrees], RemoteTransformer]]:
    """The tiny model on one pool for all tests, which is started again once a test has ended it."""
    checkpoint, started = mini.opened(mini_file), []

    def load(degrees: Degrees) -> RemoteTransformer:
        if not started or started[-1].error is not None:
            close()
            started.append(Pool(DEVICES, THREADS, start=RayRanks))
        return on_ranks(started[-1], checkpoint, degrees, "fp32", "sdpa", lambda: None)

    def close() -> None:
        for pool in started:
            pool.close()

    yield load
    close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_ranks_on_two_nodes_equal_one_process(on_ray, remote, given, expected):
    degrees = Degrees(pipe=2)
    model = on_ray(degrees)
    assert len({psutil.Process(pid).ppid() for pid in model.pool.whole.ranks.pids}) == 2  # two raylets: two nodes
    output = model.predict(ModelCall(*given), lambda: None)
    assert mini.relative(output, expected) <= 1e-5
    assert torch.equal(output, remote(degrees).predict(ModelCall(*given), lambda: None))  # of this machine's own ranks


def test_no_room_is_refused_with_the_numbers(on_ray):
    """A core that is never there, and ones that are taken; what was running goes on."""
    pool = on_ray(Degrees(pipe=2)).pool
    with pytest.raises(ValueError, match=rf"^devices: 3 ranks .* {3 * THREADS} CPU cores \({THREADS} for each CPU rank\)"):
        Pool(DEVICES + DEVICES[:1], THREADS, start=RayRanks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_ranks, "PLACE_SECONDS", 1.0)
        with pytest.raises(ValueError, match=r"^devices: .* has 0 GPUs and 0 CPU cores free of"):
            Pool(DEVICES, THREADS, start=RayRanks)
    assert pool.error is None


def swap(path: Path) -> None:
    """Of the same size and header, as another training of the model has."""
    mini.save(mini.random_model(seed=1), path)


@pytest.mark.parametrize(
    ("change", "words"), [(Path.unlink, "does not exist at"), (swap, "differs between this machine and ComfyUI's machine")]
)
@pytest.mark.full
def test_a_machine_without_the_model_or_with_another_is_named(on_ray, mini_model, tmp_path, change, words):
    """On one machine the file is the same for all, so here it changes after the client's look at it."""
    path = mini.save(mini_model, tmp_path / "model.safetensors")
    model = on_ray(Degrees(pipe=2))
    pool, ask = model.pool, model.pool.ask

    def changed(message, reply, *rest):
        if isinstance(message, Load):
            change(path)
        return ask(message, reply, *rest)

    pool.ask = changed
    wanted = rf"rank \d \({PLACE}\) failed in loading: ValueError: model_name: .*model.safetensors {words}"
    with pytest.raises(RankError, match=wanted):
        on_ranks(pool, mini.opened(path), Degrees(pipe=2), "fp32", "sdpa", lambda: None)
    assert wait_until_gone(pool.whole.ranks.pids)


def test_a_killed_actor_is_named_and_the_next_pool_works(on_ray, given, expected):
    lose_a_rank(on_ray, given, expected, rf"rank 1 \({PLACE}\) (was ended|has gone)")


def test_without_a_cluster_the_error_says_how_to_start_one(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ValueError, match=r"^devices: RAY_ADDRESS is ray://"):
        Pool(DEVICES, THREADS, start=RayRanks)


@pytest.mark.full
def test_no_actor_outlives_a_killed_client(cluster, on_ray, tmp_path):
    on_ray(Degrees(pipe=2)).pool.close()  # room for another one
    script = tmp_path / "comfyui_main.py"
    script.write_text(
        "import threading\n"
        "from parallel_backend.processes.pool import Pool\n"
        "from parallel_backend.processes.ray_ranks import RayRanks\n"
        f"pool = Pool({DEVICES}, {THREADS}, start=RayRanks)\n"
        "pool.ready.result()\n"
        "print(*pool.whole.ranks.pids, flush=True)\n"
        "threading.Event().wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    try:
        said = process.stdout.readline().decode().split()
        pids = [int(pid) for pid in said] + [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(living_actors(cluster)) == 2
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert wait_until_gone(pids)
    assert until(lambda: not living_actors(cluster))
