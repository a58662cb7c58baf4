"""What a call changes inside the blocks: ranks compute what one process does with diffusers' own class, changed alike."""

import pytest
import torch

from parallel_backend.client.call import Conditioning, ModelCall, TokenLayout
from parallel_backend.client.memory_guard import request_of
from parallel_backend.core.block_changes import BlockChanges, NormalizedGuidance
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.families import FAMILIES
from testing import tiny
from testing.cases import all_cases

pytestmark = pytest.mark.threads

CASES = {case.name: case for case in all_cases()}
GUIDANCE = NormalizedGuidance(5.0, 1.5, 0.5, positive=Span(1, 2), negative=Span(0, 1))
GUIDED = BlockChanges(guidance=GUIDANCE)


def nothing() -> None: ...


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Case -> (diffusers' model, its file, inputs of a call)."""
    known = {}

    def make(name: str):
        if name not in known:
            case = CASES[name]
            model = case.model()
            known[name] = model, case.save(model, tmp_path_factory.mktemp("changes") / f"{name}.safetensors"), case.inputs()
        return known[name]

    return make


def test_entries_that_look_at_each_other_are_one_replicas():
    order = TokenOrder(6, 3)
    conditioning = Conditioning(1, TokenLayout((2, 3)), order, 0, 3, {}, first_replica=1, changes=GUIDED)
    assert conditioning.shares(2) == (Span(3, 3), Span(0, 3))
    degrees = Degrees(batch=2, pipe=2)
    request = request_of(conditioning, FAMILIES["wan"])
    assert [request.entries_on(degrees, degrees.coordinate(rank)) for rank in range(4)] == [0, 0, 3, 3]


def test_wan_is_led_away_from_a_second_text(pools, made):
    """By batch entry, and in bands as in whole calls."""
    _, path, (x, timestep, tensors) = made("wan-2.1-i2v")
    away = torch.randn(len(x), 7, tensors["context"].shape[-1], generator=torch.Generator().manual_seed(4))
    model = pools.load(path, Degrees(ulysses=2))

    def output(alphas: tuple[float, ...], away=away) -> torch.Tensor:
        settings = torch.tensor([(5.0, 1.5, alpha) for alpha in alphas])
        return model.predict(ModelCall(x, timestep, tensors | {"away": away, "normalized": settings}), nothing)

    plain, guided = model.predict(ModelCall(x, timestep, tensors), nothing), output((0.5, 0.0))
    assert tiny.relative(guided[1:], plain[1:]) <= 1e-6
    assert tiny.relative(guided[:1], plain[:1]) > 1e-3
    assert tiny.relative(output((0.5, 0.5))[:1], guided[:1]) <= 1e-6
    with torch.inference_mode():
        embedded = tiny.whole_model(path).condition_embedder.text_embedder(away)
    assert tiny.relative(output((0.5, 0.0), embedded), guided) <= 1e-6  # as the native model hands it to Parallelize Model
    assert tiny.relative(output((0.5, 0.5), tensors["context"]), plain) <= 1e-5  # away from itself: it stays
