"""Ranks as actors on a real Ray cluster: two nodes on this machine, one rank on each."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.client import pools
from parallel_backend.client.call import ModelCall
from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.cores import usable_cores
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes import ray_ranks
from parallel_backend.processes.pool import Pool, RankError
from parallel_backend.processes.ray_ranks import RayRanks
from parallel_backend.wire.loading import Load
from testing import mini
from testing.models import on_ranks
from tests.processes.test_failures import Loss, listening, wait_until_gone

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


class Nodes:
    """A cluster on the loopback interface. The head is this machine's own node, the other can be taken away."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
        self.other = None
        self.add()

    def add(self) -> None:
        self.other = self.cluster.add_node(**NODE)

    def remove(self, gracefully: bool) -> None:
        self.cluster.remove_node(self.other, allow_graceful=gracefully)

    def living_actors(self) -> list[str]:
        actors = self.cluster.global_state.actor_table(None, None, None)
        return [name for name, actor in actors.items() if actor["State"] != "DEAD"]

    def rank_on_other(self, pool: Pool) -> int:
        """Which rank is not on the head. Every worker process is its node's raylet's child."""
        raylet = self.other.all_processes["raylet"][0].process.pid
        (rank,) = (rank for rank, pid in enumerate(pool.pids) if psutil.Process(pid).ppid() == raylet)
        return rank


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        nodes = Nodes()
        patch.setenv("RAY_ADDRESS", nodes.cluster.address)
        yield nodes
        nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def given():
    return mini.inputs()


@pytest.fixture(scope="module")
def expected(mini_model, given):
    return mini.reference(mini_model, *given)


class Kept:
    """One pool for all tests, started again once a test has ended it."""

    def __init__(self, path: Path):
        self.checkpoint, self.pool = mini.opened(path), None

    def load(self, degrees: Degrees) -> RemoteTransformer:
        if self.pool is None or self.pool.error is not None:
            self.close()
            self.pool = Pool(DEVICES, THREADS, start=RayRanks)
        return on_ranks(self.pool, self.checkpoint, degrees, "fp32", "sdpa", lambda: None)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None


@pytest.fixture(scope="module")
def kept(nodes, mini_file) -> Iterator[Kept]:
    kept = Kept(mini_file)
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def on_ray(kept) -> Callable[[Degrees], RemoteTransformer]:
    return kept.load


@pytest.fixture
def no_pool(kept) -> None:
    """Room for another one."""
    kept.close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("degrees", [Degrees(pipe=2), pytest.param(Degrees(ulysses=2), marks=pytest.mark.full)], ids=str)
def test_ranks_on_two_nodes_equal_one_process(on_ray, remote, given, expected, measured, degrees):
    model = on_ray(degrees)
    assert len({psutil.Process(pid).ppid() for pid in model.pool.pids}) == 2  # two raylets: two nodes
    output = model.predict(ModelCall(*given), lambda: None)
    error = mini.relative(output, expected)
    measured("relative error of ranks on Ray", error)
    assert error <= 1e-5
    assert torch.equal(output, remote(degrees).predict(ModelCall(*given), lambda: None))  # of this machine's own ranks


@pytest.mark.full
def test_pipefusion_in_bands_is_that_of_local_ranks_bit_for_bit(on_ray, remote, given):
    x, _, tensors = given

    def sample(model):
        return sample_in_bands(model, x, linear_sigmas(4), Prompt(tensors, tensors, 1.0), 3, 1)[0]

    assert torch.equal(sample(on_ray(Degrees(pipe=2))), sample(remote(Degrees(pipe=2))))


@pytest.mark.full
def test_on_one_machine_all_listen_on_loopback_only(on_ray):
    pool = on_ray(Degrees(ulysses=2)).pool
    ours = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert ours  # the store's
    assert {c.laddr.ip for c in ours} == {"127.0.0.1"}
    for pid in pool.pids:
        assert "127.0.0.1" in listening(pid)  # Gloo; Ray's own server, which every actor has, listens everywhere


@pytest.mark.usefixtures("nodes")
def test_no_room_is_refused_with_the_numbers(on_ray):
    """A core that is never there, and ones that are taken; what was running goes on.

    Before the tests that take a node away, whose cores Ray counts for half a minute more.
    """
    with pytest.raises(ValueError, match=rf"^devices: 3 ranks .* {3 * THREADS} CPU cores \({THREADS} for each CPU rank\)"):
        Pool(DEVICES + DEVICES[:1], THREADS, start=RayRanks)
    pool = on_ray(Degrees(pipe=2)).pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_ranks, "PLACE_SECONDS", 1.0)
        with pytest.raises(ValueError, match=r"^devices: .* has 0 GPUs and 0 CPU cores free of"):
            Pool(DEVICES, THREADS, start=RayRanks)
    assert pool.error is None


def swap(path: Path) -> None:
    """Of the same size and header, as another training of the model has."""
    mini.save(mini.random_model(seed=1), path)


@pytest.mark.parametrize(
    ("change", "words"), [(Path.unlink, "does not exist at"), (swap, "is not the same on this machine as on ComfyUI's")]
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
    assert wait_until_gone(pool.pids)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_actor_is_named_and_the_next_pool_works(on_ray, given, expected, victim, measured):
    loss = Loss(on_ray, given, expected, measured)
    kill = lambda: os.kill(loss.model.pool.pids[victim], signal.SIGKILL)  # noqa: E731
    loss.check("an actor's death", kill, rf"rank {victim} \({PLACE}\) (was ended|has gone)")


@pytest.mark.parametrize(
    "gracefully", [pytest.param(True, marks=pytest.mark.full, id="shut down"), pytest.param(False, id="cut off")]
)
@pytest.mark.full
def test_a_lost_node_is_named_and_the_next_pool_works_on_another(nodes, on_ray, given, expected, gracefully, measured):
    loss = Loss(on_ray, given, expected, measured)
    words = rf"rank {nodes.rank_on_other(loss.model.pool)} \({PLACE}\) (was lost with its machine|has gone)"
    loss.check("a node's removal", lambda: nodes.remove(gracefully), words, nodes.add)


@pytest.mark.full
@pytest.mark.usefixtures("nodes")
def test_gpus_that_are_never_there_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"^devices: 2 ranks on ray:cuda, ray:cuda need 2 GPUs .* has 0 GPUs and"):
        Pool(("ray:cuda", "ray:cuda"), THREADS, start=RayRanks)


def test_without_a_cluster_the_error_says_how_to_start_one(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ValueError, match=r"^devices: RAY_ADDRESS is ray://"):
        Pool(DEVICES, THREADS, start=RayRanks)


@pytest.mark.usefixtures("no_pool")
@pytest.mark.full
def test_a_machine_without_the_pack_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_ranks, "ROOT", str(tmp_path))
    with pytest.raises(RankError, match=rf"rank \d \({PLACE}\) .*Parallel DiT is not at {tmp_path} on this machine"):
        Pool(DEVICES, THREADS, start=RayRanks)


@pytest.mark.usefixtures("no_pool")
@pytest.mark.full
def test_the_registry_starts_ranks_where_the_devices_say(mini_file, given, expected):
    registry = Registry()
    key = mini.setup(mini_file, "fp32", DEVICES, Degrees(pipe=2), "sdpa")
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(registry):
        patch.setattr(pools, "usable_cores", lambda: 2 * THREADS)
        model = registry.model(key, lambda: None)
        assert isinstance(model.pool.ranks, RayRanks)
        assert mini.relative(model.predict(ModelCall(*given), lambda: None), expected) <= 1e-5
        assert registry.bytes_on(key, "cuda:0") == 0  # ComfyUI is told of nothing on its own GPU
        assert registry.model(key, lambda: None) is model
        registry.unload(key)
        assert model.pool.error is None


@pytest.mark.usefixtures("no_pool")
@pytest.mark.full
def test_closing_leaves_nothing(nodes, tmp_path, monkeypatch):
    assert until(lambda: not nodes.living_actors())
    folder = tmp_path  # other processes' pools have their folders in the usual place
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    files, ports, children = set(folder.glob("parallel-dit-*")), listening(os.getpid()), psutil.Process().children()
    pool = Pool(DEVICES, THREADS, start=RayRanks)
    pool.ready.result(timeout=300)
    assert len(nodes.living_actors()) == 2
    driver = [child for child in psutil.Process().children() if child not in children]
    assert len(driver) == 1
    pool.close()
    pool.close()
    assert wait_until_gone(pool.pids)
    assert until(lambda: not nodes.living_actors())
    assert psutil.Process().children() == children
    assert listening(os.getpid()) == ports
    assert set(folder.glob("parallel-dit-*")) == files


@pytest.mark.full
def test_a_stopped_rank_does_not_outlive_its_pool(nodes, on_ray):
    pool = on_ray(Degrees(pipe=2)).pool
    os.kill(pool.pids[1], signal.SIGSTOP)
    pool.close(politely=False)
    assert wait_until_gone(pool.pids)
    assert until(lambda: not nodes.living_actors())


@pytest.mark.usefixtures("no_pool")
@pytest.mark.full
def test_no_actor_outlives_a_killed_client(nodes, tmp_path):
    script = tmp_path / "comfyui_main.py"
    script.write_text(
        "import threading\n"
        "if __name__ == '__main__':\n"
        "    from parallel_backend.processes.pool import Pool\n"
        "    from parallel_backend.processes.ray_ranks import RayRanks\n"
        f"    pool = Pool({DEVICES}, {THREADS}, start=RayRanks)\n"
        "    pool.ready.result()\n"
        "    print(*pool.pids, flush=True)\n"
        "    threading.Event().wait()\n"
        "else:\n"
        "    print('imported again', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    try:
        said = process.stdout.readline().decode().split()
        pids = [int(pid) for pid in said] + [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(nodes.living_actors()) == 2
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert wait_until_gone(pids)
    assert until(lambda: not nodes.living_actors())
