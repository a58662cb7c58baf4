"""Ulysses by all-gather gives what one process gives, of every family whose blocks say how."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.validate import check_exchange, check_model
from testing import tiny
from testing.cases import all_cases
from testing.cases.case import Case

pytestmark = pytest.mark.threads

ALL_GATHER = "all-gather"
TOLERANCE = 1e-5


CASES = [case for case in all_cases() if case.row.blocks.can_gather]


def degrees_of(case: Case) -> Degrees:
    """Three ranks, with uneven heads and tokens, where the model has heads for them."""
    return Degrees(ulysses=min(3, case.row.sizes.heads(case.config)), exchange=ALL_GATHER)


QUICK = ("wan-2.2-animate",)
"""One of each family that has it."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in CASES]
)
def test_every_family_equals_its_class(case, pools, tmp_path, measured):
    model = case.model()
    given = case.inputs(latent=case.odd or case.latent)
    with torch.inference_mode():
        expected = case.reference(model, *given)
    file = case.save(model, tmp_path / "model.safetensors")
    output = pools.load(file, degrees_of(case)).predict(ModelCall(*given), lambda: None)
    error = tiny.relative(output, expected)
    measured(f"relative error by all-gather, {case.name}", error)
    assert error <= TOLERANCE


FLUX = Degrees(ulysses=2, exchange=ALL_GATHER)


def test_what_does_not_go_with_it_is_refused():
    with pytest.raises(ValueError, match=r"^ulysses_exchange is 'all-gather' and tensor_parallel_degree is 2"):
        replace(FLUX, tensor=2)
    with pytest.raises(ValueError, match=r"^ulysses_exchange is 'both'"):
        Degrees(ulysses=2, exchange="both")
    with pytest.raises(ValueError, match=r"^transfer_dtype is 'int8' and ulysses_exchange"):
        check_exchange(FLUX, "int8", compiled=False)
    with pytest.raises(ValueError, match=r"^transfer_dtype is 'residual' and ulysses_exchange"):
        check_exchange(FLUX, "residual", compiled=False)
    with pytest.raises(ValueError, match=r"^compile is on and ulysses_exchange"):
        check_exchange(FLUX, "full", compiled=True)
    check_exchange(Degrees(ulysses=2), "int8", compiled=True)
    with pytest.raises(ValueError, match=r"^ulysses_exchange is 'all-gather', which this kind of model does not have"):
        check_model(FLUX, heads=4, blocks=2)
    with pytest.raises(ValueError, match=r"this model has 2 groups of attention heads"):
        check_model(replace(FLUX, ulysses=3), heads=6, blocks=2, key_heads=2, can_gather=True)
