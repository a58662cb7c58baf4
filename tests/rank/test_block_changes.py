"""What a call changes inside the blocks: ranks compute what one process does with diffusers' own class, changed alike."""

import inspect
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from parallel_backend.client.call import Conditioning, ModelCall, TokenLayout
from parallel_backend.client.memory_guard import request_of
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.core.block_changes import UNCHANGED, BlockChanges, NormalizedGuidance
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


@contextmanager
def skipping(case, model, names):
    """diffusers' class, whose blocks of these names return what they are given."""
    blocks = [
        (spec, block)
        for spec in case.row.blocks.lists
        for index, block in enumerate(getattr(model, spec.name))
        if f"{spec.name}.{index}" in names
    ]
    for spec, block in blocks:
        signature = inspect.signature(block.forward)

        def unchanged(*args, spec=spec, signature=signature, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            if spec.joined or len(spec.returns) == 1:
                return given[spec.image]
            return tuple(given[spec.image if stream == "image" else spec.text] for stream in spec.returns)

        block.forward = unchanged
    try:
        yield
    finally:
        for _, block in blocks:
            del block.forward


@contextmanager
def guiding(words: int, text_first: bool):
    """diffusers' attention of one process, with guidance of the image's tokens behind it."""
    backends = _AttentionBackendRegistry._backends
    native = backends[AttentionBackendName.NATIVE]

    def guided(*args, **kwargs):
        out = native(*args, **kwargs)
        if len(out) > 2:
            return out  # layers of a text's own, which have more entries
        image = out[:, words:] if text_first else out[:, : out.shape[1] - words]
        negative, positive = image.flatten(2)
        away = 5.0 * positive - 4.0 * negative
        grown = away.norm(p=1, dim=-1, keepdim=True) / positive.norm(p=1, dim=-1, keepdim=True)
        image[:] = (0.5 * away * (1.5 / grown).clamp(max=1) + 0.5 * positive).view_as(image[0])
        return out

    with mock.patch.dict(backends, {AttentionBackendName.NATIVE: guided}):
        yield


@pytest.mark.parametrize(
    ("name", "degrees", "skipped"),
    [
        ("flux-dev", Degrees(pipe=2), ("transformer_blocks.1", "single_transformer_blocks.4")),
        ("flux-dev", Degrees(tensor=2), ("single_transformer_blocks.2",)),
    ],
    ids=str,
)
def test_skipped_blocks_give_out_what_they_are_given(pools, made, name, degrees, skipped):
    case, (model, path, given) = CASES[name], made(name)
    remote = pools.load(path, degrees)
    with torch.inference_mode():
        plain = case.reference(model, *given)
        with skipping(case, model, skipped):
            expected = case.reference(model, *given)
    assert tiny.relative(plain, expected) > 1e-3
    assert tiny.relative(remote.predict(ModelCall(*given, changes=BlockChanges(skipped)), nothing), expected) <= 1e-5
    assert tiny.relative(remote.predict(ModelCall(*given), nothing), plain) <= 1e-5


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("flux-dev", Degrees(pipe=2)),
        ("flux-dev", Degrees(batch=2)),
        ("flux-dev", Degrees(tensor=2)),
        ("flux-dev", Degrees(ring=2)),
    ],
    ids=str,
)
def test_normalized_guidance_looks_at_both_prompts_in_every_mode(pools, made, name, degrees):
    case, (model, path, given) = CASES[name], made(name)
    with torch.inference_mode(), guiding(given[2]["context"].shape[1], case.row.blocks.text_first):
        expected = case.reference(model, *given)
    found = pools.load(path, degrees).predict(ModelCall(*given, changes=GUIDED), nothing)
    assert tiny.relative(found, expected) <= 1e-5


def test_in_bands_changed_calls_have_keys_of_their_own(pools, made):
    """Calls with and without changes in turn give what runs of either alone give."""
    _, path, (x, timestep, tensors) = made("flux-dev")
    model = pools.load(path, Degrees(pipe=2))
    rows = cut_rows(tuple(x.shape), 2, model.family.patching)
    kinds = (UNCHANGED, replace(GUIDED, skipped=("transformer_blocks.1",)))

    def outputs(kinds) -> dict[BlockChanges, torch.Tensor]:
        run = BandedRun(model, rows, tuple(x.shape), warm_up=True)

        def sample(band: int) -> torch.Tensor:
            found = {kind: [] for kind in kinds}
            for step in range(3):
                own, time = x[:, :, rows[band].slice] * (1 - step / 8), timestep - step / 8
                for kind in kinds:
                    found[kind].append(run.predict(band, ModelCall(own, time, tensors, changes=kind), step == 0))
            return torch.stack([torch.cat(found[kind]) for kind in kinds])

        parts = run_bands(run, sample, nothing, nothing)
        model.close_run(run.run, nothing)
        return dict(zip(kinds, torch.cat(parts, dim=3), strict=True))

    together = outputs(kinds)
    for kind in kinds:
        assert torch.equal(together[kind], outputs((kind,))[kind])
    assert tiny.relative(together[kinds[1]], together[UNCHANGED]) > 1e-3


def test_entries_that_look_at_each_other_are_one_replicas():
    order = TokenOrder(6, 3)
    conditioning = Conditioning(1, TokenLayout((2, 3)), order, 0, 3, {}, first_replica=1, changes=GUIDED)
    assert conditioning.shares(2) == (Span(3, 3), Span(0, 3))
    degrees = Degrees(batch=2, pipe=2)
    request = request_of(conditioning, FAMILIES["flux"])
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
