"""What a person is shown of the ranks: states, memory and models, read without a message to any rank."""

import os
import signal
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from parallel_backend.client.measurements import measured_links
from parallel_backend.client.overview import overview_of
from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.wire import messages as m
from testing import mini


def pool_with(beat, ready=True, error=None):
    done = Future()
    if ready:
        done.set_result(None)
    return SimpleNamespace(
        devices=("cpu",),
        watchdog=SimpleNamespace(beat=lambda _rank: beat),
        ready=done,
        error=error,
        links={(0, 1): (2e9, 3e-5)},
        notes=(),
        ranks=SimpleNamespace(logs=None),
    )


@pytest.mark.parametrize(
    ("beat", "more", "state", "doing"),
    [
        (None, {"ready": False}, "starting", ""),
        (m.HeartbeatMessage(0, "importing torch", 1, False), {"ready": False}, "starting", "importing torch"),
        (m.HeartbeatMessage(0, m.IDLE, 1, False, 5, 9), {}, "idle", ""),
        (m.HeartbeatMessage(0, "micro-step 7", 1, False, 5, 9, 3), {}, "working", "micro-step 7"),
        (m.HeartbeatMessage(0, "micro-step 7", 1, True, 5, 9), {}, "waiting", "micro-step 7"),
        (m.HeartbeatMessage(0, "micro-step 7", 1, True, 5, 9), {"error": RuntimeError("killed\nits log")}, "failed", ""),
    ],
)
def test_what_a_rank_does(beat, more, state, doing):
    found = overview_of(pool_with(beat, **more), [])
    (rank,) = found.ranks
    assert (rank.state, rank.doing) == (state, doing)
    assert (rank.free, rank.total) == ((5, 9) if beat is not None and beat.total_bytes else (0, 0))
    assert rank.run == (0 if beat is None else beat.run_bytes)
    assert found.links == ((0, 1, 2e9, 3e-5),)
    assert found.error == ("killed" if "error" in more else "")


def test_weights_that_are_elsewhere_are_counted(tmp_path):
    model = SimpleNamespace(
        checkpoint=SimpleNamespace(path=tmp_path / "wan.safetensors"),
        degrees=Degrees(ulysses=2),
        resident=SimpleNamespace(weights=[SimpleNamespace(total=10), SimpleNamespace(total=10)]),
        weight_bytes=[10, 4],
        adapter_bytes=[1, 0],
        is_parked=False,
        last_run=[
            SimpleNamespace(compute_seconds=3.0, wait_seconds=0.5, streaming_wait_seconds=0.5),
            SimpleNamespace(compute_seconds=1.0, wait_seconds=3.0, streaming_wait_seconds=0.0),
        ],
    )
    model.streamed_bytes = RemoteTransformer.streamed_bytes.fget(model)
    pool = pool_with(m.HeartbeatMessage(0, m.IDLE, 1, False))
    pool.devices = ("cuda:0", "cuda:1")
    pool.whole, pool.place, model.pool = pool, lambda rank: rank, pool
    found = overview_of(pool, [SimpleNamespace(model=model)])
    (shown,) = found.models
    assert (shown.name, shown.weights, shown.streamed) == ("wan.safetensors", (11, 4), (0, 6))
    assert shown.computing == (0.75, 0.25)
    assert [rank.weights for rank in found.ranks] == [11, 4]


def until(found, seconds=60):
    """Waits until `found()` is true, and returns it."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return value


@pytest.mark.processes
def test_models_and_ranks_from_start_to_end(mini_file):
    registry = Registry()
    try:
        assert registry.overview() == []
        setup = mini.setup(mini_file, "fp32", ("cpu", "cpu"), Degrees(pipe=2), "sdpa", "even")
        model = registry.model(setup, lambda: None)
        (pool,) = until(lambda: [each for each in registry.overview() if all(rank.total for rank in each.ranks)])
        assert [rank.device for rank in pool.ranks] == ["cpu", "cpu"]
        assert all(0 < rank.free <= rank.total for rank in pool.ranks)
        (shown,) = pool.models
        assert (shown.name, shown.degrees, shown.parked) == (mini_file.name, "pipefusion_degree 2", False)
        assert list(shown.weights) == model.weight_bytes == [rank.weights for rank in pool.ranks]
        assert sum(shown.streamed) == 0
        until(lambda: all(rank.state == "idle" for rank in registry.overview()[0].ranks))
        assert pool.links == ()
        measured_links(model.pool, (1 << 10, 1 << 20), lambda: None)
        ((one, two, rate, latency),) = registry.overview()[0].links
        assert (one, two) == (0, 1)
        assert rate > 0
        assert latency >= 0

        os.kill(model.pool.pids[1], signal.SIGKILL)
        (pool,) = until(lambda: [each for each in registry.overview() if each.error])
        assert "rank 1 (cpu) was killed" in pool.error
        assert [rank.state for rank in pool.ranks] == ["failed", "failed"]
        assert pool.models == ()  # they are not on ranks any more
    finally:
        registry.close()
