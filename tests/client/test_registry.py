"""Which ranks the registry keeps and which it ends, without any."""

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from parallel_backend.client import registry as registry_module
from parallel_backend.client.registry import ModelKey, Registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import LinksDown, RankError
from parallel_backend.wire.rank_settings import SELF_TEST

DEVICES = ("cpu", "cpu")


class FakePool:
    """`down`: the backend of pools whose links fail, with P2P or in any case."""

    down: dict[bool, str] = {}  # noqa: RUF012  # replaced, never changed

    def __init__(self, devices, self_test, **_settings):
        self.devices, self.error, self.closed, self.ready = devices, None, False, Future()
        self.self_test, self.asked = self_test, []
        if backend := self.down.get(self_test.p2p):
            self.ready.set_exception(LinksDown("the self-test failed", backend))
        else:
            self.ready.set_result([])

    def close(self, politely=True):
        self.closed = True

    def ask(self, question, _answer):
        self.asked.append(type(question).__name__)
        done = Future()
        done.set_result([])
        return done


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr("parallel_backend.client.registry.Pool", FakePool)
    registry = Registry()
    yield registry
    registry.close()


def nobody() -> None:
    pass


def test_working_ranks_are_kept(registry):
    pool = registry.pool_for(DEVICES, nobody)
    assert registry.pool_for(DEVICES, nobody) is registry.pool_for(None, nobody) is pool
    assert not pool.closed


@pytest.mark.parametrize("devices", [DEVICES, None], ids=["the same devices", "any devices"])
def test_failed_ranks_are_ended_and_not_given_out_again(registry, devices):
    failed = registry.pool_for(DEVICES, nobody)
    failed.error = RankError("rank 1 (cpu) was killed by signal 9")
    registry._model = object()
    assert registry.present() is None
    pool = registry.pool_for(devices, nobody)
    assert failed.closed
    assert registry.present() is None
    if devices is None:
        assert pool is None
    else:
        assert pool is not failed
        assert pool.error is None


def test_ranks_on_other_devices_are_ended(registry):
    pool = registry.pool_for(DEVICES, nobody)
    other = registry.pool_for(("cpu",), nobody)
    assert pool.closed
    assert not other.closed


class FakeModel:
    def __init__(self, pool, *_arguments, **_named):
        self.pool, self.retired = pool, False

    def retire(self):
        self.retired = True

    def bytes_on(self, device):
        return 5 * (device in self.pool.devices)


@pytest.fixture
def loaded(registry, monkeypatch):
    """`loaded(name, *devices)`: (key, the model of it)."""
    monkeypatch.setattr(registry_module, "RemoteTransformer", FakeModel)
    monkeypatch.setattr(registry_module, "open_checkpoint", lambda path: None)

    def load(name, *devices):
        key = ModelKey(Path(name), "fp32", devices, Degrees(pipe=len(devices)), "sdpa")
        return key, registry.model(key, nobody)

    return load


def test_models_on_gpus_that_are_apart_stay_both(registry, loaded):
    first_key, first = loaded("positive", "cuda:0", "cuda:1")
    second_key, second = loaded("negative", "cuda:2")
    assert loaded("positive", "cuda:0", "cuda:1")[1] is first
    assert loaded("negative", "cuda:2")[1] is second is registry.present()
    assert [registry.bytes_on(first_key, device) for device in ("cuda:0", "cuda:2")] == [5, 0]
    assert registry.runs_on(first_key.devices)
    assert registry.runs_on(second_key.devices)
    assert registry.release_unused(first_key, "cuda:0") == 0
    assert first.pool.asked == ["ReleaseUnused"]
    registry.unload(first_key)
    assert (first.retired, second.retired) == (True, False)
    assert registry.bytes_on(first_key, "cuda:0") == 0
    assert not first.pool.closed
    assert loaded("positive", "cuda:0", "cuda:1")[1].pool is first.pool
    registry.unload()
    assert (first.pool.asked[-1], second.pool.asked) == ("Unload", ["Unload"])
    registry.close()
    assert first.pool.closed
    assert second.pool.closed


def test_ranks_aside_end_where_their_gpus_are_wanted_or_they_have_failed(registry, loaded):
    _, first = loaded("one", "cuda:0", "cuda:1")
    _, second = loaded("two", "cuda:2")
    _, third = loaded("three", "cuda:1", "cuda:3")
    assert (first.pool.closed, second.pool.closed) == (True, False)
    second.pool.error = RankError("rank 0 (cuda:2) was killed by signal 9")
    assert loaded("two", "cuda:2")[1].pool is not second.pool
    assert second.pool.closed
    assert not third.pool.closed
    loaded("four", "cpu")
    assert third.pool.closed


def test_ranks_whose_links_fail_under_nccl_are_tried_once_more_without_p2p(registry, monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(FakePool, "down", {True: "nccl"})
    second = registry.pool_for(DEVICES, nobody).self_test
    assert not second.p2p
    assert SELF_TEST.seconds + second.seconds <= 75
    registry.close()
    assert not registry.pool_for(DEVICES, nobody).self_test.p2p  # as is known now
    monkeypatch.setattr(FakePool, "down", {})
    assert registry.pool_for(("cuda:0", "cuda:1"), nobody).self_test.p2p  # of these nothing is known


def test_p2p_stays_on_where_a_second_try_was_given_up(registry, monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(FakePool, "down", {True: "nccl"})

    def use() -> None:
        if registry._pool.self_test.p2p:
            raise LinksDown("the self-test failed", "nccl")
        raise KeyboardInterrupt  # Cancel

    with pytest.raises(KeyboardInterrupt):
        registry._on_ranks(DEVICES, use)
    registry.close()
    monkeypatch.setattr(FakePool, "down", {})
    assert registry.pool_for(DEVICES, nobody).self_test.p2p


@pytest.mark.parametrize(
    ("down", "p2p_disable"),
    [({True: "gloo"}, None), ({True: "nccl", False: "nccl"}, None), ({True: "nccl"}, "1")],
    ids=["Gloo", "without P2P too", "P2P was off"],
)
def test_links_that_fail_whatever_is_tried_are_an_error_and_the_next_prompt_begins_anew(
    registry, monkeypatch, down, p2p_disable
):
    if p2p_disable is None:
        monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    else:
        monkeypatch.setenv("NCCL_P2P_DISABLE", p2p_disable)
    monkeypatch.setattr(FakePool, "down", down)
    with pytest.raises(LinksDown, match="the self-test failed"):
        registry.pool_for(DEVICES, nobody)
    registry._pool.error = LinksDown("the self-test failed")  # as a pool has it
    monkeypatch.setattr(FakePool, "down", {})
    assert registry.pool_for(DEVICES, nobody).self_test.p2p


def test_room_for_a_model_that_loads_may_be_that_of_another_one(registry, monkeypatch):
    """ComfyUI then unloads a MODEL that the ranks had before, on the thread that loads."""
    keys = [ModelKey(Path(name), "fp32", DEVICES, Degrees(pipe=2), "sdpa") for name in ("before", "now")]

    class Loading:
        def __init__(self, *_arguments, make_room, **_named):
            self.freed = make_room("cuda:0", 1)

    def make_room(device: str, missing: int) -> int:
        registry.unload(keys[0])
        return 7 + registry.release_unused(keys[0], device)

    monkeypatch.setattr(registry_module, "RemoteTransformer", Loading)
    monkeypatch.setattr(registry_module, "open_checkpoint", lambda path: None)
    found = []
    load = threading.Thread(target=lambda: found.append(registry.model(keys[1], nobody, make_room=make_room)), daemon=True)
    load.start()
    load.join(30)
    assert [model.freed for model in found] == [7]
