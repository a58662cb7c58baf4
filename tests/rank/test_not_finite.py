"""A NaN is an error that names where it began, in a whole call and in a band; ranks live on and the next run is right."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.not_finite import NotFiniteError, check_conditioning, explanation
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.finite import all_finite
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


def found(**named) -> list[m.NotFiniteFound]:
    """Of two ranks; `named`: "weights1" are those of rank 1."""
    return [m.NotFiniteFound(rank, named.get(f"weights{rank}", ()), named.get(f"adapters{rank}", ())) for rank in range(2)]


IN_FILE = {"a": "a", "b": "b", "q.weight": "to_q.weight"}
"""By the ranks' names, their keys."""


def said(answers, dtype="bf16", adapted=False, controlled=False) -> str:
    return explanation(answers, dtype, adapted, controlled, IN_FILE)


def test_the_explanation_says_what_to_change():
    assert "weights are not finite in a, b: the file is damaged" in said(found(weights1=("a", "b")))
    assert "too small for them: use bf16 or fp32; or the file" in said(found(weights1=("a",)), dtype="fp16")
    assert "The LoRA's own values are not finite in a: remove it" in said(found(adapters1=("a",)), adapted=True)
    twice = found(adapters0=("q.weight",), adapters1=("q.weight",))
    assert "The LoRA's own values are not finite in to_q: remove it" in said(twice)
    assert "fp16 overflows in many models: use bf16 or fp32" in said(found(), dtype="fp16")
    text = said(found(), adapted=True, controlled=True)
    assert "lower the LoRA's strength; lower the ControlNet's strength." in text
    assert "fp16" not in text
    assert "weight_dtype fp32" in said(found())


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
def test_a_damaged_file_is_named_with_rank_and_tensor(pools, damaged_file, mini_file, way):
    model = pools.mini(damaged_file, Degrees(pipe=2))
    for _ in range(2):  # the second time nothing is left of the first
        with pytest.raises(NotFiniteError) as error:
            WAYS[way](model)
        text = str(error.value)
        assert f"not finite in {LAST_BLOCK}: the file is damaged" in text
    assert model.pool.error is None
    pids = model.pool.pids
    well = pools.mini(mini_file, Degrees(pipe=2))
    assert well.pool.pids == pids
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
    with pytest.raises(NotFiniteError, match=re.escape(LAST_BLOCK)):
        model.predict(ModelCall(*mini.inputs()), nobody)
    if degrees.displaced:
        with pytest.raises(NotFiniteError, match=re.escape(LAST_BLOCK)):
            in_bands(model)
    assert model.pool.error is None
    with pytest.raises(NotFiniteError):
        model.predict(ModelCall(*mini.inputs()), nobody)


def test_a_lora_that_is_not_finite_is_named(pools, mini_file, mini_model):
    model = pools.mini(mini_file, Degrees(pipe=2))
    shape = load_file(mini_file)[LAST_BLOCK].shape
    up = torch.zeros(shape[0], 2)
    up[0, 0] = INF
    given = mini.inputs()
    try:
        model.adapt("bad", [Delta(LAST_BLOCK, up, torch.ones(2, shape[1]), 1.0)], nobody)
        with pytest.raises(
            NotFiniteError, match=f"own values are not finite in {LAST_BLOCK.removesuffix('.weight')}: remove it"
        ):
            model.predict(ModelCall(*given), nobody)
        bias = LAST_BLOCK.replace("weight", "bias")
        model.adapt("bad bias", [Delta(bias, torch.full((shape[0],), NAN), None, 1.0)], nobody)
        with pytest.raises(NotFiniteError, match=f"The LoRA's own values are not finite in {bias}: remove it"):
            model.predict(ModelCall(*given), nobody)
        model.adapt("strong", [Delta(LAST_BLOCK, up.nan_to_num(0, 1e30, 0) * 1e8, torch.ones(2, shape[1]), 1.0)], nobody)
        with pytest.raises(NotFiniteError, match="lower the LoRA's strength"):
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
    sent, send = [], model.pool.send
    model.pool.send = lambda rank, message, *asked: (sent.append(type(message)), send(rank, message, *asked))
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
        del model.pool.send
    assert m.Step not in sent
    assert model.predict(ModelCall(*mini.inputs()), nobody).isfinite().all()
