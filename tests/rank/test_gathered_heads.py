"""Ulysses by all-gather gives what one process gives, of every family whose blocks say how."""

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.families.base.blocks import gathers
from testing import tiny
from testing.cases import all_cases
from testing.cases.case import Case

pytestmark = pytest.mark.threads

ALL_GATHER = "all-gather"
TOLERANCE = 1e-5


def can_gather(case: Case) -> bool:
    return any(gathers(over, spec) for spec in case.row.blocks.lists for over in spec.attention.values())


CASES = [case for case in all_cases() if can_gather(case)]


def degrees_of(case: Case) -> Degrees:
    """Three ranks, with uneven heads and tokens, where the model has heads for them."""
    sizes = case.row.sizes
    heads = sizes.key_heads(case.config) or sizes.heads(case.config)
    return Degrees(ulysses=min(3, heads), exchange=ALL_GATHER)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
