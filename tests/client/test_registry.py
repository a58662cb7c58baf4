"""Which ranks the registry keeps and which it ends, without any."""

from concurrent.futures import Future

import pytest

from parallel_backend.client.registry import Registry
from parallel_backend.processes.pool import RankError

DEVICES = ("cpu", "cpu")


class FakePool:
    def __init__(self, devices, **_settings):
        self.devices, self.error, self.closed, self.ready = devices, None, False, Future()
        self.ready.set_result([])

    def close(self, politely=True):
        self.closed = True


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
