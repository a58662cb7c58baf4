"""Links between ranks that do not come up, and a store that goes away: who says so, when, and that the next prompt works."""

import functools
import time
from contextlib import closing

import pytest

from parallel_backend.client import pools
from parallel_backend.client.call import ModelCall
from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes import local
from parallel_backend.processes.failure_text import NCCL_OFF, NVLINK_ALONE, P2P_OFF
from parallel_backend.processes.pool import LinksDown, Pool, RankError
from parallel_backend.wire.rank_settings import SelfTest
from testing import mini
from testing.models import nobody, on_ranks
from tests.processes.test_failures import wait_until_gone
from tests.support import deaf_rank

pytestmark = pytest.mark.processes

LIMIT = 2.0
"""Seconds of the self-test here. It has 60."""
BOUND = LIMIT + 10.0
"""Seconds until its error that tests allow: a rank more may explain it for one, and the machine may be busy with others."""


def pool() -> Pool:
    return Pool(("cpu", "cpu"), self_test=SelfTest(LIMIT))


def load(pool: Pool, path) -> RemoteTransformer:
    return on_ranks(pool, mini.opened(path), Degrees(pipe=2), "fp32", "sdpa", nobody)


@pytest.mark.parametrize(
    ("when", "what"),
    [
        ("start", "a transfer between rank 0 (cpu) and rank 1 (cpu), on all ranks,"),
        ("loading", "the link (to rank 1|from rank 0) (cpu)"),
    ],
)
def test_a_link_that_never_comes_up_is_named_and_the_next_prompt_works(monkeypatch, mini_file, given, expected, when, what):
    with monkeypatch.context() as patch:
        patch.setattr(local, "rank_entry", lambda: functools.partial(deaf_rank.deaf, when))
        with closing(pool()) as deaf:
            began = time.monotonic()
            if when == "loading":
                deaf.ready.result(timeout=300)
                began = time.monotonic()
            with pytest.raises(LinksDown, match=what.replace("(cpu)", r"\(cpu\)")) as error:
                load(deaf, mini_file)
            assert time.monotonic() - began < BOUND
            assert error.value.backend == "gloo"
            assert f"did not end within {LIMIT:g} s. Try: " in str(error.value)
            assert wait_until_gone(deaf.ranks.pids)
    with closing(pool()) as working:
        assert mini.relative(load(working, mini_file).predict(ModelCall(*given), nobody), expected) <= 1e-5


def test_a_store_that_goes_away_while_ranks_wait_for_each_other_is_named(monkeypatch):
    """Rank 1 is slow to start; without the look at the file rank 0 would wait for it until nobody starts any more."""
    monkeypatch.setattr(local, "rank_entry", lambda: deaf_rank.late)
    with closing(pool()) as waiting:
        store = waiting.ranks.directory / "store"
        while not store.stat().st_size:  # rank 0 has begun to join
            time.sleep(0.02)
        began = time.monotonic()
        store.unlink()
        with pytest.raises(RankError, match=r"rank \d \(cpu\) failed in start-up: StoreError: the file .* was removed"):
            waiting.ready.result(timeout=300)
        assert time.monotonic() - began < BOUND


@pytest.mark.parametrize(
    ("works", "note"),
    [
        pytest.param("P2P over NVLink alone", NVLINK_ALONE, marks=pytest.mark.full),
        pytest.param("no P2P", P2P_OFF, marks=pytest.mark.full),
        ("Gloo", NCCL_OFF),
    ],
)
def test_where_nccl_fails_ranks_talk_in_another_way(monkeypatch, mini_file, given, works, note):
    monkeypatch.delenv(pools.P2P_DISABLE, raising=False)
    monkeypatch.setattr(local, "rank_entry", lambda: functools.partial(deaf_rank.deaf_by_nccl, works))
    monkeypatch.setattr(pools, "SELF_TEST", SelfTest(LIMIT))
    monkeypatch.setattr(pools, "SECONDS", LIMIT)
    said: list[str] = []
    with closing(Registry()) as registry:
        key = mini.setup(mini_file, "fp32", ("cpu", "cpu"), Degrees(pipe=2), "sdpa", "even")
        model = registry.model(key, nobody, lambda doing, _fraction: said.append(doing))
        assert said[-1].endswith(note)
        assert model.pool.notes == (note,)
        assert model.predict(ModelCall(*given), nobody).isfinite().all()
