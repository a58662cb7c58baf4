"""The trial of blocks that other nodes skip: what it proves, and that it sees what would be wrong on ranks."""

import pytest

from parallel_backend.own_class.trials.change_trial import Shown, TrialOfSkips
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.test_own_class_bands import call
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")

KINDS = "double_block", "single_block"
TIMES = 900.0, 1.0


def skips(name: str) -> Shown:
    proof = trial(planted(name), call(), TIMES, bands=True)
    assert (proof.stages, proof.sequence, proof.bands) == ("", "", "")
    return TrialOfSkips(planted(name), proof, call(), TIMES, kinds=KINDS).shown()


def test_blocks_that_ranks_skip_as_the_class_does_are_proven():
    assert skips("Skippable") == Shown(lists={"double_block": "streams", "single_block": "blocks"})
    assert skips("OneList") == Shown(lists={"double_block": "streams"}), "of the others the class asks for none"


GIVES = "blocks that return their arguments give a different result"
ORDER = "the skipped blocks are not a complete list of blocks in order"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("AddsWorkLate", GIVES),
        ("Backwards", ORDER),
        ("KeepsSkips", "a call with skipped blocks changes later calls"),
    ],
)
def test_skipped_blocks_that_ranks_would_get_wrong_are_not_proven(name, why):
    found = skips(name)
    assert not found.lists
    assert why in found.why
