"""Ulysses by all-gather gives what one process gives, of every family whose blocks say how."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.core.validate import check_exchange, check_model
from parallel_backend.placement.model_sizes import model_sizes, weights_by_rank
from testing import tiny
from testing.cases import all_cases
from testing.cases.case import Case
from testing.quantised import quantise_blocks
from tests.rank.test_quantised_ranks import flux_tensors

pytestmark = pytest.mark.threads

ALL_GATHER = "all-gather"
TOLERANCE = 1e-5


CASES = [case for case in all_cases() if case.row.blocks.can_gather]


def degrees_of(case: Case) -> Degrees:
    """Three ranks, with uneven heads and tokens, where the model has heads for them."""
    return Degrees(ulysses=min(3, case.row.sizes.heads(case.config)), exchange=ALL_GATHER)


QUICK = ("flux-dev", "wan-2.1-t2v", "minimax-h3-pruned")
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


def test_bands_with_old_keys_are_those_of_all_to_all(pools, flux_file):
    noise, _, tensors = tiny.inputs(tiny.FLUX, height=16, width=12)

    def run(exchange: str) -> torch.Tensor:
        model = pools.load(flux_file, Degrees(ulysses=2, pipe=2, exchange=exchange))
        return sample_in_bands(model, noise, linear_sigmas(4), Prompt(tensors, {}, 1.0), 3, warm_up=1)[0]

    assert tiny.relative(run(ALL_GATHER), run("all-to-all")) <= TOLERANCE


def test_bytes_sent(pools, flux_file):
    """Hidden states to every other rank, and of the results all but the rank's own tokens. Rotary tables once a call."""
    inputs = tiny.inputs(tiny.FLUX)
    layers, batch, tokens, width, head = 8, 2, 7 + 8 * 6, 8 * 16, 16
    for ranks in (2, 4):
        model = pools.load(flux_file, Degrees(ulysses=ranks, exchange=ALL_GATHER))
        model.close_run(model.open_run(), lambda: None)
        model.predict(ModelCall(*inputs), lambda: None)
        sent = sum(stats.bytes_sent["ulysses"] for stats in model.close_run(model.open_run(), lambda: None))
        states = layers * batch * tokens * width * (ranks - 1)
        results = layers * batch * tokens * width * (ranks - 1) // ranks
        tables = tokens * head // 2 * 4 * (ranks - 1)
        assert sent == pytest.approx(4 * (states + results + tables), rel=0.01)  # heads and tokens of ranks may be uneven


def test_a_rank_has_the_layers_of_its_heads_and_the_memory_model_knows(pools, flux_file):
    sizes, degrees = model_sizes(open_checkpoint(flux_file), "fp32", "cpu"), Degrees(ulysses=4, exchange=ALL_GATHER)
    held = pools.load(flux_file, degrees).weight_bytes
    expected = weights_by_rank(sizes, degrees, (Span(0, len(sizes.block_bytes)),))
    assert held == pytest.approx([weights.total for weights in expected], rel=1e-3)
    whole = pools.load(flux_file, Degrees(ulysses=4)).weight_bytes[0]
    assert whole - held[0] == pytest.approx(0.75 * sum(sizes.gathered), rel=0.01)


@pytest.mark.parametrize("kind", ["int8, rotated", "nvfp4", "fp8"])
def test_quantised_layers_are_cut_by_rows(pools, tmp_path, kind):
    """The layers of all ranks together are those of the file, so what formats round is rounded alike."""
    case = replace(CASES[0], config=CASES[0].native.config, tensors=flux_tensors)
    quantised, _ = quantise_blocks(load_file(case.save(case.model(), tmp_path / "plain.safetensors")), kind)
    save_file({key: value.contiguous() for key, value in quantised.items()}, tmp_path / "quantised.safetensors")
    found = {
        degrees: pools.load(tmp_path / "quantised.safetensors", degrees).predict(ModelCall(*case.inputs()), lambda: None)
        for degrees in (Degrees(ulysses=2), FLUX)
    }
    by_all_to_all, gathered = found.values()
    assert tiny.relative(gathered, by_all_to_all) <= (2e-2 if kind == "int8, rotated" else TOLERANCE)


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
