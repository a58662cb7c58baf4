"""A NaN is an error that says what to change, in a whole call and in a band; ranks live on and the next run is right."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.not_finite import NotFiniteError, all_finite, check_conditioning, not_finite
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.wire import messages as m
from testing import mini
from testing.models import nobody

pytestmark = pytest.mark.threads

NAN, INF = float("nan"), float("inf")
LAST_BLOCK = "single_blocks.4.linear2.weight"
"""On the second of two stages."""


# What counts.


def test_large_values_are_finite():
    assert all_finite(torch.full((10,), 3e38))  # their sum is not
    assert all_finite(torch.full((1000,), 60000.0, dtype=torch.float16))
    assert not all_finite(torch.tensor([INF, -INF]))
    assert all_finite(torch.tensor([1, 2])) and all_finite(torch.empty(0))


def test_a_mask_of_scores_may_be_infinite():
    check_conditioning({"context": torch.ones(1, 2, 3), "text_mask": torch.tensor([[0.0, -INF]])})
    check_conditioning({"mask": torch.tensor([True, False]), "ids": torch.tensor([1])})
    with pytest.raises(ValueError, match="positive, negative: the conditioning's 'pooled' holds values that are not finite"):
        check_conditioning({"pooled": torch.tensor([[0.0, -INF]])})


def test_the_error_says_what_to_change():
    assert "fp16 overflows in many models: use bf16 or fp32" in str(not_finite("fp16", False, False))
    text = str(not_finite("bf16", True, True))
    assert "lower the LoRA's strength, or remove it; lower the ControlNet's strength; download" in text
    assert "fp16" not in text
    assert "weight_dtype fp32" in str(not_finite("bf16", False, False))


# On ranks.


@pytest.fixture(scope="module")
def damaged_file(mini_file, tmp_path_factory):
    """A NaN in one weight of the last block."""
    state = load_file(mini_file)
    state[LAST_BLOCK][3, 5] = NAN
    path = tmp_path_factory.mktemp("damaged") / "damaged.safetensors"
    save_file(state, path)
    return path


def in_bands(model, steps=4, bands=3, seed=1):
    x, _, tensors = mini.inputs(seed=seed)
    return sample_in_bands(
        model, x, linear_sigmas(steps), Prompt(tensors, {}, 1.0), 1 if model.degrees.displaced else bands, 1
    )


WAYS = {
    "a call": lambda model: model.predict(ModelCall(*mini.inputs()), nobody),
    "a run": in_bands,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_file_ends_the_run_and_no_rank(pools, damaged_file, mini_file, way):
    model = pools.mini(damaged_file, Degrees(pipe=2))
    for _ in range(2):  # the second time nothing is left of the first
        with pytest.raises(NotFiniteError, match="if it is damaged"):
            WAYS[way](model)
    assert model.pool.error is None
    pids = model.pool.whole.ranks.pids
    well = pools.mini(mini_file, Degrees(pipe=2))
    assert well.pool.whole.ranks.pids == pids
    after, before = in_bands(well)[0], in_bands(pools.mini(mini_file, Degrees(pipe=2), fresh=True))[0]
    assert torch.equal(after, before)
    assert after.isfinite().all()


@pytest.mark.parametrize(
    "degrees",
    [Degrees(ulysses=2), Degrees(ring=2), Degrees(tensor=2), Degrees(batch=2), Degrees(patch=2, patch_mode="displaced")],
    ids=str,
)
def test_every_mode_finds_it(pools, damaged_file, degrees):
    model = pools.mini(damaged_file, degrees)
    with pytest.raises(NotFiniteError, match="if it is damaged"):
        model.predict(ModelCall(*mini.inputs()), nobody)
    if degrees.displaced:
        with pytest.raises(NotFiniteError, match="if it is damaged"):
            in_bands(model)
    assert model.pool.error is None
    with pytest.raises(NotFiniteError):
        model.predict(ModelCall(*mini.inputs()), nobody)


def test_a_lora_that_is_not_finite_ends_the_run(pools, mini_file, mini_model):
    model = pools.mini(mini_file, Degrees(pipe=2))
    shape = load_file(mini_file)[LAST_BLOCK].shape
    up = torch.zeros(shape[0], 2)
    up[0, 0] = INF
    given = mini.inputs()
    try:
        model.adapt("bad", [Delta(LAST_BLOCK, up, torch.ones(2, shape[1]), 1.0)], nobody)
        with pytest.raises(NotFiniteError, match="lower the LoRA's strength, or remove it"):
            model.predict(ModelCall(*given), nobody)
    finally:
        model.adapt(None, (), nobody)
    assert mini.relative(model.predict(ModelCall(*given), nobody), mini.reference(mini_model, *given)) < 1e-5


@settings(max_examples=15)
@given(st.sampled_from(["x", "time", "context", "pooled", "guidance"]), st.sampled_from([NAN, INF, -INF]), st.booleans())
def test_inputs_are_refused_by_name_before_they_are_sent(remote, what, bad, bands):
    model = remote(Degrees(pipe=2))
    x, timestep, tensors = mini.inputs()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    nonfinite = {"x": x, "time": timestep, **tensors}[what]
    nonfinite.view(-1)[-1] = bad
    sent, watchdog = [], model.pool.watchdog
    watchdog.sent = lambda message, number: (sent.append(type(message)), type(watchdog).sent(watchdog, message, number))
    name = {"x": "latent_image: the sampler gave the model a latent", "time": "sigmas: "}.get(
        what, f"positive, negative: the conditioning's '{what}'"
    )
    try:
        with pytest.raises(ValueError, match=name):
            if bands and what != "time":
                sample_in_bands(model, x, linear_sigmas(3), Prompt(tensors, {}, 1.0), 3, 1)
            else:
                model.predict(ModelCall(x, timestep, tensors), nobody)
    finally:
        del watchdog.sent
    assert m.Step not in sent
    assert model.predict(ModelCall(*mini.inputs()), nobody).isfinite().all()
