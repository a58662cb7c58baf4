"""Trials of classes that a call tells numbers of blocks: those of the few blocks that are tried take their place."""

import dataclasses

import pytest

from parallel_backend.own_class.calls.call_arguments import OPTIONS
from parallel_backend.own_class.calls.tried_calls import NUMBERED
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.test_own_class import TIMES, call
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")


def proof(name: str) -> Proof:
    given = call()
    told = dataclasses.replace(given, named={**given.named, OPTIONS: {NUMBERED: [29]}})
    return trial(planted(name), told, TIMES, bands=True, tensor=2)


def test_blocks_that_attend_wherever_they_are_told_are_proven():
    found = proof("Numbered")
    assert (found.stages, found.batch, found.sequence, found.bands, found.tensor) == ("",) * 5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LeavesCallOut", "blocks.1 attends less often than in the trial"),
        ("PoolsWhereTold", "blocks.2 attends to different values if its tokens are cut"),
    ],
)
def test_what_told_blocks_would_get_wrong_is_not_proven(name, why):
    found = proof(name)
    assert (found.stages, found.sequence) == ("", why)
    assert found.bands


def test_told_blocks_that_mix_entries_are_seen():
    assert proof("MixesEntries").batch
