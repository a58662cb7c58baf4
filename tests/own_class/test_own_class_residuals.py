"""The trial of a class that adds a control's residuals between its blocks."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.own_class.calls.residuals import AROUND, TRIED_ROWS, fitted, for_trial
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.planted_classes import WIDTH
from tests.own_class.test_own_class_bands import call as call_of_bands
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")


def controlled_call(*kinds: str) -> Call:
    call = call_of_bands()
    x, context = call.x.expand(2, *call.x.shape[1:]), call.named["context"].expand(2, 5, 16)
    residual = torch.randn(2, 3 * 4 * 6, WIDTH, generator=torch.Generator().manual_seed(1))
    control = for_trial({f"{kind}.1": residual for kind in kinds or ("input",)})
    return replace(call, x=x, timestep=call.timestep.expand(2), named={"context": context, "control": control})


def proof(name: str, *kinds: str) -> Proof:
    return trial(planted(name), controlled_call(*kinds), (1.0,), bands=True)


@pytest.mark.parametrize("name", ["Controlled", "ToPicture"])
def test_residuals_that_ranks_get_right_are_proven(name):
    found = proof(name, "input", "output")
    assert (found.stages, found.batch, found.sequence, found.bands) == ("", "", "", "")


OTHER = "attends to different values if its tokens are cut"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("PooledLate", OTHER),
        ("FromNeighbour", OTHER),
        ("AtTheEnd", OTHER),
    ],
)
def test_residuals_of_all_tokens_are_right_on_sequence_ranks_and_wrong_in_bands(name, why):
    """A sequence rank has those of all tokens, among which its own stand (tests/emulated/test_own_class.py)."""
    found = proof(name, "input", "output")
    assert (found.stages, found.batch, found.sequence) == ("", "", "")
    assert any(block.placed for block in found.blocks)
    assert why in found.bands


@pytest.mark.parametrize("name", ["KeepsResidual", "WritesResidual"])
def test_residuals_that_a_class_keeps_or_writes_to_are_refused(name):
    assert not proof(name).blocks
    assert proof(name).stages


def test_residuals_that_are_of_the_whole_batch_keep_it_together():
    found = proof("PoolsResiduals")
    assert found.batch
    assert not found.stages


ALL = f"{AROUND}double_block"


@pytest.mark.parametrize(("name", "placed"), [("AroundBlocks", False), ("Skippable", True)])
def test_residuals_that_a_function_around_a_block_adds_to_all_tokens_are_proven(name, placed):
    """All tokens have their places if the class counts them, or if a block has two streams."""
    found = proof(name, ALL)
    assert (found.stages, found.batch, found.sequence, found.bands) == ("", "", "", "")
    assert any(block.placed for block in found.blocks) is placed


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("TakesNeighboursLate", ("sequence", "bands")),
        ("TakesOfBatch", ("batch",)),
    ],
)
def test_what_ranks_get_wrong_around_a_block_is_refused(name, ways):
    found = proof(name, ALL)
    assert all(getattr(found, way) for way in ways), found


def test_residuals_of_all_tokens_fit_them():
    residual = torch.randn(1, TRIED_ROWS, 2)
    assert torch.equal(fitted(residual, 2 * TRIED_ROWS), residual.repeat(1, 2, 1))
    assert fitted(torch.zeros(1, 5, 2), 5).shape == (1, 5, 2)
    with pytest.raises(Unproven, match="adds to 5 tokens, but the call has 6"):
        fitted(torch.zeros(1, 5, 2), 6)
