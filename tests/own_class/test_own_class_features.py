"""Layers of ComfyUI's own class that tensor ranks share: what a trial finds and proves, and what it sees to be wrong."""

import json
from dataclasses import replace

import pytest
import torch

from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.tried_calls import draw_weights
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.plans.plan import ListPlan, of_json
from parallel_backend.own_class.trials.feature_trial import check_shared
from parallel_backend.own_class.trials.trial import trial
from scripts.plans.plan_json import lists_of, to_json
from tests.own_class.planted_tokens import HEADS, SIZE, WIDTH, rows
from tests.own_class.test_own_class import TIMES, call
from tests.own_class.test_own_class_bands import call as of_video
from tests.support.planted_comfyui import planted as own

pytestmark = pytest.mark.usefixtures("comfyui")


def proven(name: str, ranks: int, **more):
    return trial(own(name), call(), TIMES, sequence=False, tensor=ranks, **more)


QKV = "column", (WIDTH, WIDTH, WIDTH)
MOD = "gather", (6 * WIDTH,)
FEED_FORWARD = {"up": ("column", (48, 48)), "down": ("row", (48,))}
SHARED = {
    "PacksQueries": {"qkv": QKV, "proj": ("row", (WIDTH,)), "mod": MOD, **FEED_FORWARD},
    "JoinsFeedForward": {"first": ("column", (WIDTH, WIDTH, WIDTH, 48)), "last": ("row", (WIDTH, 48)), "mod": MOD},
    "TablesByHead": {"qkv": QKV, "proj": ("row", (WIDTH,)), "mod": MOD, **FEED_FORWARD},
    "NormsAllHeads": {
        **{layer: ("column", (WIDTH,)) for layer in "qkv"},
        "of_all": ("norm", (WIDTH,)),
        "proj": ("row", (WIDTH,)),
        "mod": MOD,
        **FEED_FORWARD,
    },
    "Right": {"lin": ("column", (WIDTH,)), "out": ("row", (WIDTH,)), "mod": ("gather", (2 * WIDTH,))},
    "SharedKeys": {
        "q": ("column", (WIDTH,)),
        "kv": ("column", (2 * SIZE, 2 * SIZE)),
        "out": ("row", (WIDTH,)),
        "mod": ("gather", (2 * WIDTH,)),
    },
}


@pytest.mark.parametrize("name", SHARED)
def test_layers_that_ranks_can_share_are_found_and_proven(name):
    proof = proven(name, 2)
    assert (proof.stages, proof.tensor) == ("", "")
    assert len(proof.blocks) == 4
    for block in proof.blocks:
        assert {cut.layer: (cut.kind, cut.sizes) for cut in block.cuts} == SHARED[name]


def test_a_block_with_layers_of_its_own_is_tried_beside_the_others():
    """The third of four, which another would stand for otherwise: it attends twice, and has wider layers."""
    given = call()
    proof = trial(own("OtherBlockBetween"), given, TIMES, tensor=2)
    assert (proof.stages, proof.sequence, proof.tensor) == ("", "", "")
    assert [len(block.attention) for block in proof.blocks] == [1, 1, 2, 1]
    assert [sum(cut.sizes) for block in proof.blocks for cut in block.cuts if cut.layer == "down"] == [48, 48, 96, 48]
    names = [block.name for block in proof.blocks]
    (listed,) = of_json(tuple[ListPlan, ...], json.loads(json.dumps(to_json(lists_of(proof.blocks)))))
    assert tuple(listed.whole(names)) == proof.blocks


QKV_BY_HEADS = *QKV, (HEADS, HEADS, HEADS)
UNEVEN = {
    ("PacksQueries", 3): {"qkv": QKV_BY_HEADS, "proj": ("row", (WIDTH,), (HEADS,)), **FEED_FORWARD},
    ("NormsAllHeads", 3): {
        **{layer: ("column", (WIDTH,), (HEADS,)) for layer in "qkv"},
        "of_all": ("norm", (WIDTH,), (HEADS,)),
        "proj": ("row", (WIDTH,), (HEADS,)),
        **FEED_FORWARD,
    },
    ("SharesThreeKeys", 2): {
        "q": ("column", (6 * SIZE,), (3,)),
        "kv": ("column", (3 * SIZE, 3 * SIZE), (3, 3)),
        "proj": ("row", (6 * SIZE,), (3,)),
        "up": ("column", (48, 48), (3, 3)),
        "down": ("row", (48,), (3,)),
    },
}
"""(Class, ranks) -> kind, sizes and units of its layers. A feed-forward is even if it is not as wide as attention, whose
width a class may know by the same number."""


@pytest.mark.parametrize(("name", "ranks"), UNEVEN)
def test_heads_that_ranks_cannot_share_evenly(name, ranks):
    proof = proven(name, ranks)
    assert (proof.stages, proof.tensor) == ("", "")
    for block in proof.blocks:
        found = {cut.layer: (cut.kind, cut.sizes, cut.units) for cut in block.cuts if cut.kind != "gather"}
        assert found == {layer: (*cut, ())[:3] for layer, cut in UNEVEN[name, ranks].items()}


@pytest.mark.parametrize(
    ("name", "ranks", "why"),
    [
        ("PacksQueries", 5, "its 4 heads cannot be shared by 5 ranks"),
        ("SharedKeys", 4, "neither its heads nor its features"),
        ("CentresAllHeads", 2, "neither its heads nor its features"),
        ("ReadsTablesLate", 2, "ranks that share its layers give a different result"),
        ("CountsHeadsItself", 2, "the ranks' values of proj do not add up to the whole model's"),
        ("ReadsWeight", 2, "ranks that share its layers give a different result"),
        ("ReadsHeadsOutside", 2, "ranks that share its layers give a different result"),
    ],
)
def test_what_ranks_would_get_wrong_is_not_proven(name, ranks, why):
    proof = proven(name, ranks)
    assert proof.tensor.startswith(why)
    assert proof.stages == "", "the others are as before"
    assert not any(block.cuts for block in proof.blocks)


@pytest.mark.parametrize("sequence", [True, False])
def test_ranks_that_share_layers_and_tokens_or_bands_are_proven_together(sequence):
    """A class may be right with either and wrong with both."""
    given, modes = of_video(), {"sequence": sequence, "bands": not sequence}
    right, wrong = (trial(own(name), given, (1.0,), tensor=2, **modes) for name in ("PacksQueries", "FewQueriesElse"))
    alone = trial(own("FewQueriesElse"), given, (1.0,), **modes)
    for proof in (right, alone):
        assert (proof.sequence, proof.latent is None) == ("", sequence)
    assert (wrong.tensor, wrong.latent) == ("", None)
    assert (wrong.sequence or wrong.bands) == "the ranks' values of blocks.0.proj do not add up to the whole model's"


WRONG = {
    "one part for three": lambda cut: replace(cut, sizes=(3 * WIDTH,)) if cut.layer == "qkv" else cut,
    "parts of other sizes": lambda cut: replace(cut, sizes=(32, 64)) if cut.layer == "up" else cut,
    "a sum that is gathered": lambda cut: replace(cut, kind="gather", sizes=(WIDTH,)) if cut.layer == "proj" else cut,
    "not gathered": lambda cut: replace(cut, kind="column") if cut.layer == "mod" else cut,
    "input whole": lambda cut: None if cut.layer == "down" else cut,
    "heads cut evenly": lambda cut: replace(cut, units=()) if cut.layer in ("q", "proj") else cut,
    "keys of heads cut evenly": lambda cut: replace(cut, units=()) if cut.layer == "kv" else cut,
    "a norm that is not shared": lambda cut: replace(cut, kind="gather") if cut.layer == "of_all" else cut,
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_proof_sees_a_wrong_cut_whoever_has_found_it(fault):
    """The rule may be wrong: nothing runs by it alone."""
    name = "NormsAllHeads" if "norm" in fault else "SharesThreeKeys" if "heads" in fault else "PacksQueries"
    block, g = proven(name, 2).blocks[0], torch.Generator().manual_seed(0)
    cuts = [WRONG[fault](cut) for cut in block.cuts]
    model = build(own(name))
    draw_weights(model, 0)
    x, emb = torch.randn(2, 6, WIDTH, generator=g), torch.randn(2, WIDTH, generator=g)

    def run(_rank):
        with torch.no_grad():
            return model.blocks[0](x.clone(), emb, rows(6, x))

    block = replace(block, name="")
    check_shared(model.blocks[0], [block], run, 2)
    with pytest.raises(Unproven):
        check_shared(model.blocks[0], [replace(block, cuts=tuple(filter(None, cuts)))], run, 2)
