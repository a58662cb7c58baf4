"""The trials of what other nodes change in blocks: what they prove, and that they see what would be wrong on ranks."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.call_arguments import OPTIONS
from parallel_backend.own_class.calls.tried_calls import NUMBERED, Call
from parallel_backend.own_class.cuts.guided_attention import normalized
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.change_trial import (
    SETTINGS,
    Shown,
    TrialOfGuidance,
    TrialOfSecondText,
    TrialOfSkips,
)
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.test_own_class import TIMES as OF_RUN
from tests.own_class.test_own_class import call
from tests.own_class.test_own_class_bands import call as call_of_bands
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")

TIMES = 900.0, 1.0


# Blocks that are skipped.


def skips(name: str) -> Shown:
    proof = trial(planted(name), call_of_bands(), TIMES, bands=True)
    assert (proof.stages, proof.sequence, proof.bands) == ("", "", "")
    return TrialOfSkips(planted(name), proof, call_of_bands(), TIMES, kinds=("double_block", "single_block")).shown()


def test_blocks_that_ranks_skip_as_the_class_does_are_proven():
    assert skips("Skippable") == Shown(lists={"double_block": "streams", "single_block": "blocks"})
    assert skips("OneList") == Shown(lists={"double_block": "streams"}), "of the others the class asks for none"


RETURN = "blocks that return their arguments give a different result"
ORDER = "the skipped blocks are not a complete list of blocks in order"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("AddsWorkLate", RETURN),
        ("Backwards", ORDER),
        ("KeepsSkips", "a call with skipped blocks changes later calls"),
    ],
)
def test_skipped_blocks_that_ranks_would_get_wrong_are_not_proven(name, why):
    found = skips(name)
    assert not found.lists
    assert why in found.why


# Attention that is guided.


def call_of_prompts() -> Call:
    """Of both prompts."""
    return replace(call(), options={"cond_or_uncond": [0, 1]})


def guided(name: str, tensor: int = 1) -> Shown:
    proof = trial(planted(name), call_of_prompts(), TIMES, bands=True, tensor=tensor)
    assert (proof.stages, proof.sequence, proof.bands) == ("", "", "")
    assert not proof.tensor or tensor == 1
    return TrialOfGuidance(planted(name), proof, call_of_prompts(), TIMES, tensor, prompts=(Span(0, 1), Span(1, 2))).shown()


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


# A second text.

OF_ENTRIES = torch.tensor([SETTINGS, (*SETTINGS[:2], 0.0)])
"""The first entry of two is guided."""


def node(module, second):
    """As KJNodes' WanVideoNAG."""

    def forward(x, context, before=0):
        out = module.looked(x, context[:, before:])
        positive, away = (each[:, :, None] for each in (out[:1], module.looked(x, second.expand(len(x), -1, -1))[:1]))
        return module.o(torch.cat((normalized(positive, away, *SETTINGS)[:, :, 0], out[1:])))

    return forward


def led_away(name: str, tensor: int = 1, cut: bool = True, settings: torch.Tensor = OF_ENTRIES) -> Shown:
    """`cut`: tokens are cut in the proof."""
    proof = trial(planted(name), call(), TIMES, sequence=cut, bands=cut, tensor=tensor)
    assert (proof.stages, proof.batch) == ("", "")
    assert not cut or (proof.sequence, proof.bands) == ("", "")
    assert not proof.tensor or tensor == 1
    return TrialOfSecondText(planted(name), proof, call(), TIMES, tensor, settings=settings, node=node).shown()


def test_a_second_text_that_ranks_look_at_as_the_node_does_is_proven():
    assert led_away("Looks") == Shown(has_effect=True)
    assert led_away("Looks", tensor=2) == Shown(has_effect=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("PadsText", GIVES),
        ("PadsTextLate", GIVES),
        ("MasksText", "its attention to the prompt is not a call over [B, S, C] without a mask"),
    ],
)
def test_a_second_text_that_ranks_would_get_wrong_is_not_proven(name, why):
    found = led_away(name)
    assert why in found.why, found


def test_entries_that_the_node_leaves_alone_are_told_apart():
    assert GIVES in led_away("Looks", settings=OF_ENTRIES.flip(0)).why


def test_values_that_are_made_with_all_tokens_are_seen_if_none_are_cut():
    assert GIVES in led_away("ValuesOfLatent", cut=False).why


# Numbers of blocks: those of the few that are tried take their place.


def told(name: str) -> Proof:
    given = call()
    numbers = replace(given, named={**given.named, OPTIONS: {NUMBERED: [29]}})
    return trial(planted(name), numbers, OF_RUN, bands=True, tensor=2)


def test_blocks_that_attend_wherever_they_are_told_are_proven():
    found = told("Numbered")
    assert (found.stages, found.batch, found.sequence, found.bands, found.tensor) == ("",) * 5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LeavesCallOut", "blocks.1 attends less often than in the trial"),
        ("PoolsWhereTold", "blocks.2 attends to different values if its tokens are cut"),
    ],
)
def test_what_told_blocks_would_get_wrong_is_not_proven(name, why):
    found = told(name)
    assert (found.stages, found.sequence) == ("", why)
    assert found.bands


def test_told_blocks_that_mix_entries_are_seen():
    assert told("MixesEntries").batch
