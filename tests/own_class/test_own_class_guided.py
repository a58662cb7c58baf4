"""The trial of guided attention: what it proves, and that it sees what would be wrong on ranks."""

from dataclasses import replace

import pytest

from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.trials.change_trial import Shown, TrialOfGuidance
from parallel_backend.own_class.trials.trial import trial
from tests.own_class import test_own_class
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")

TIMES = 900.0, 1.0
PROMPTS = Span(0, 1), Span(1, 2)


def call() -> Call:
    """Of both prompts."""
    return replace(test_own_class.call(), options={"cond_or_uncond": [0, 1]})


def guided(name: str, tensor: int = 1) -> Shown:
    proof = trial(planted(name), call(), TIMES, bands=True, tensor=tensor)
    assert (proof.stages, proof.sequence, proof.bands) == ("", "", "")
    assert not proof.tensor or tensor == 1
    return TrialOfGuidance(planted(name), proof, call(), TIMES, tensor, prompts=PROMPTS).shown()


@pytest.mark.parametrize("name", ["Guides", "GuidesNumbered"])
def test_attention_that_ranks_guide_as_the_class_has_it_guided_is_proven(name):
    assert guided(name) == Shown(has_effect=True)
    assert guided(name, tensor=2) == Shown(has_effect=True)


def test_a_class_that_hands_over_nothing_needs_no_guidance():
    assert guided("HandsOverNothing") == Shown()


GIVES = "ranks that guide it give a different result"
RANKS = "ranks give a different result if it is guided"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ReadsFunctions", "it gives a different result with a function, but does not call it"),
        ("LeavesPromptsOut", GIVES),
        ("PartOfPicture", RANKS),
        ("KeepsGuided", "a guided call changes later calls"),
    ],
)
def test_guidance_that_ranks_would_get_wrong_is_not_proven(name, why):
    found = guided(name)
    assert why in found.why, found


def test_tensor_ranks_that_have_all_heads_each_are_not_proven():
    assert "the ranks' values of guided attention do not add up" in guided("WholeWidths", tensor=2).why
