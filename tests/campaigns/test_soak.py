"""The soak's plan, and what its verdict is there for. tests/comfyui/test_soak.py has short soaks."""

from dataclasses import replace

import pytest

from tests.campaigns.soak.record import CANCELLED, EMPTY, FINISHED, Ending, Reading, Soak
from tests.campaigns.soak.schedule import Batch
from tests.campaigns.soak.setups import OTHER_RANKS, TWO_RANKS
from tests.campaigns.soak.soak import plan_of
from tests.campaigns.soak.verdict import problems

WINDOW, ROUNDS = 20, 4


def clean() -> Soak:
    found = Soak(0, WINDOW, WINDOW * ROUNDS)
    for number in range(1, WINDOW * ROUNDS + 1):
        found.endings.append(Ending(number, "pipe 0", "pipe", "", FINISHED, difference=0.0))
        found.readings.append(Reading(number, EMPTY, "rank 0", 11, 300_000_000, 20, 9, files=1))
    return found


@pytest.mark.parametrize(
    ("ending", "reading", "said"),
    [
        ({}, {}, ""),
        ({"difference": 1e-7}, {}, "prompt 80 (pipe 0): differs from the same request alone by 1e-07"),
        ({"status": CANCELLED, "difference": None}, {}, "prompt 80 (pipe 0): was cancelled, though nobody asked for it"),
        ({}, {"allocated": 310_000_000}, "rank 0 grew by 3.3 % from 300.0 MB"),
        ({}, {"threads": 12}, "rank 0 has 12 threads with nothing loaded, 9 before"),
        ({}, {"files": 2}, "2 temporary files or folders at once, where one pool has one"),
    ],
)
def test_what_is_wrong_at_the_end_is_said(ending, reading, said):
    found = clean()
    found.endings[-1] = replace(found.endings[-1], **ending)
    found.readings[-WINDOW:] = [replace(each, **reading) for each in found.readings[-WINDOW:]]
    assert problems(found) == ([said] if said else [])


@pytest.mark.parametrize("prompts", [25, 500])
def test_plan(prompts):
    """Each round has the same requests, and cancels no prompt that has ranks load."""
    plan = plan_of(prompts, seed=0)
    assert plan == plan_of(prompts, seed=0)
    turns = [turn for batch in plan.batches for turn in batch.turns]
    assert len(turns) == prompts
    rounds = [turns[start : start + plan.window] for start in range(0, plan.lived, plan.window)]
    names = [{turn.request.name for turn in some if not turn.cancel} for some in rounds]
    assert all(found == names[0] for found in names)
    assert {turn.request.setup for turn in turns} == {*TWO_RANKS, *OTHER_RANKS}
    assert 0.08 < sum(turn.cancel != "" for turn in turns) / len(turns) < 0.3
    before, seen = Batch(()), 0
    for batch in plan.batches:
        if seen < plan.lived and batch.turns:
            loaded = before.turns[-1].request.setup if before.turns and not before.after else None
            assert batch.turns[0].request.setup == loaded or not batch.turns[0].cancel
        seen += len(batch.turns)
        before = batch
