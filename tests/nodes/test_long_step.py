"""What stands on the node while a run's first step, or a step in which ranks compile, takes long."""

from types import SimpleNamespace

import pytest

from parallel_backend.wire.lifecycle import COMPILING


class Model(SimpleNamespace):
    """A poll has no more than a weak reference to it."""


@pytest.fixture
def watched(module, monkeypatch):
    """(a model on two ranks, a poll that has to be called at a time, what was said)."""
    loading_bar, said, now = module("ui.loading_bar"), [], [0.0]
    monkeypatch.setattr(loading_bar, "say", said.append)
    monkeypatch.setattr(loading_bar, "check_cancelled", lambda: None)
    monkeypatch.setattr(loading_bar.time, "monotonic", lambda: now[0])
    doing = ["block 3", "block 3"]
    pool = SimpleNamespace(devices=("cpu", "cpu"), doing=doing.__getitem__, now_doing=doing)
    model = Model(pool=pool, answered=7, streamed_bytes=[0, 0])

    def poll_of(first: bool):
        poll = module("model.run.long_step").long_step(model, first)

        def at(*seconds: float) -> None:
            for now[0] in seconds:
                poll()

        return at

    return model, poll_of, said


def test_a_first_step_is_told_each_second_once_it_takes_long(watched):
    model, poll_of, said = watched
    poll = poll_of(first=True)
    poll(0.0, 4.9)
    assert said == []
    poll(5.1, 5.4, 6.2)
    assert said == ["Parallel DiT: first step, 5 s", "Parallel DiT: first step, 6 s"]
    model.answered += 1
    poll(7.0, 60.0)
    assert len(said) == 2


def test_a_rank_that_compiles_is_told_in_any_step_from_its_beginning(watched):
    model, poll_of, said = watched
    poll = poll_of(first=False)
    poll(0.0, 9.0)
    model.pool.now_doing[1] = COMPILING
    poll(10.0, 14.0, 17.5)
    assert said == ["Parallel DiT: rank 1 compiles, 7 s"]
    model.pool.now_doing[1] = "block 3"
    poll(18.0, 30.0)
    assert len(said) == 1
