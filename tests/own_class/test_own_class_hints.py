"""A class whose blocks of one list run between those of another: what its trial proves, and what it sees to be wrong."""

import json
from dataclasses import replace

import pytest
import torch

from parallel_backend.core.own_class import OwnEntry
from parallel_backend.own_class.plans.plan import ListPlan, Plan, of_json
from parallel_backend.own_class.trials.trial import trial
from scripts.plans.plan_json import lists_of, to_json
from tests.own_class.test_own_class_bands import ALONE, call
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")

BETWEEN = [
    "blocks.0",
    "hints.0",
    "blocks.1",
    "blocks.2",
    "blocks.3",
    "blocks.4",
    "hints.1",
    "blocks.5",
    "blocks.6",
    "blocks.7",
]

BEHIND_HINTS = "in a band blocks.1 attends to different values if its tokens are cut"


def hinted():
    given = call()
    return replace(
        given, named={**given.named, "hint": torch.randn(given.x.shape, generator=torch.Generator().manual_seed(5))}
    )


def proof(name: str, tensor: int = 1):
    return trial(planted(name), hinted(), (1.0,), bands=True, tensor=tensor)


def test_blocks_between_others_are_shared_out():
    found = proof("Hinted", tensor=2)
    assert (found.stages, found.sequence, found.bands, found.tensor) == ("", "", "", "")
    assert [block.name for block in found.blocks] == BETWEEN
    assert {block.name: block.until for block in found.blocks if block.until} == {
        "blocks.0": "blocks.1",
        "blocks.4": "blocks.5",
        "hints.0": "hints.1",
    }
    assert replace(found.latent, shared=(), idle=()) == replace(ALONE, again=(OwnEntry(1, before=False, behind=False),))


def test_a_plan_has_mixed_lists_in_the_order_of_a_call():
    found = proof("Hinted")
    bare = replace(found, blocks=())
    lists = lists_of(found.blocks)
    plan = Plan(
        "", "", "", (), "", (), (), (), (), (), of_json(tuple[ListPlan, ...], json.loads(json.dumps(to_json(lists)))), bare
    )
    names = {"blocks": [f"blocks.{number}" for number in range(8)], "hints": ["hints.0", "hints.1"]}
    assert plan.whole(names) == found
    with pytest.raises(KeyError):
        plan.whole({**names, "hints": ["hints.0"]})


@pytest.mark.parametrize(
    ("name", "lists", "why"),
    [
        # The hints' blocks run whole on every rank, of whose tokens a band has no part.
        ("NextHintLate", {"blocks"}, BEHIND_HINTS),
        ("HintsBehindAll", {"blocks"}, BEHIND_HINTS),
        ("LatentInHints", {"blocks", "hints"}, "tokens of its latent are in several streams"),
    ],
)
def test_what_blocks_between_others_would_get_wrong_is_not_proven(name, lists, why):
    found = proof(name)
    assert found.latent is None
    assert ({block.name.partition(".")[0] for block in found.blocks}, found.bands) == (lists, why)
