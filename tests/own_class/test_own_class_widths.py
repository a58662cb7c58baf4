"""The trial of a class whose arguments have heads: first narrower, and then at its own width, where some do otherwise."""

from unittest import mock

import pytest
import torch

from parallel_backend.own_class.trials import trial as trials
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.test_own_class import TIMES, call
from tests.support.planted_comfyui import planted as own

pytestmark = pytest.mark.usefixtures("comfyui")


def found(name: str, tensor: int = 1):
    """The proof, and the widths of the trials that it took."""
    with mock.patch.object(trials, "short_model", wraps=trials.short_model) as tried:
        proof = trial(own(name), call(), TIMES, bands=True, tensor=tensor)
    return proof, ["num_heads" not in each.args[0].arguments for each in tried.call_args_list]


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_is_found_narrower_holds_for_the_class(tensor):
    proof, own_width = found("Scaled", tensor)
    assert (proof.stages, proof.batch, proof.sequence, proof.bands) == ("", "", "", "")
    assert own_width == [False]
    assert {each.heads for block in proof.blocks for each in block.attention} == {8}
    sizes = {size for block in proof.blocks for cut in block.cuts for size in cut.sizes}
    assert sizes == (set() if tensor == 1 else {512})
    with mock.patch.object(trials, "narrowed", return_value=()):
        assert trial(own("Scaled"), call(), TIMES, bands=True, tensor=tensor) == proof


@pytest.mark.parametrize(
    ("name", "way", "why"),
    [
        ("SkipsIfWideLate", "stages", "stages give a different result"),
        ("PoolsTokensIfWide", "sequence", "blocks.1 attends to different values if its tokens are cut"),
        ("MixesHeadsIfWide", "tensor", ""),
    ],
)
def test_what_is_wrong_at_its_own_width_alone_is_not_proven(name, way, why):
    proof, own_width = found(name, tensor=2 if way == "tensor" else 1)
    assert getattr(proof, way) and getattr(proof, way).startswith(why)
    assert own_width[-1]


@pytest.mark.parametrize("share", [0.01, 0.6])
def test_it_is_given_up_as_soon_as_the_poll_says_so(share):
    """Narrower, where errors of the class are caught, and at its own width. What is done never goes back."""
    shares, threads = [], torch.get_num_threads()

    def poll(done: float) -> None:
        shares.append(done)
        if done > share:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        trial(own("Scaled"), call(), TIMES, poll, bands=True)
    assert share < shares[-1] < share + 0.2
    assert shares == sorted(shares)
    assert torch.get_num_threads() == threads


def test_a_class_that_cannot_be_narrower_is_tried_as_it_is():
    proof, own_width = found("OneWidth")
    assert (proof.stages, proof.batch, proof.sequence, proof.bands) == ("", "", "", "")
    assert own_width[-1]
