"""Traces of models on hollow devices: exact on tiny ones; the result of real ones, and the memory model beside it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sizes.table import cases, modes, row, with_predictions
from benchmarks.sizes.trace import figures, trace
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.model_sizes import model_sizes
from parallel_backend.placement.traced_states import TRACED, TracedStates, typical
from parallel_backend.rank import loaded_stage
from testing import mini
from testing.real_sizes import BY_CLASS, REAL_MODELS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NEWEST = max(RESULTS.glob("real_sizes_references_*.json"))
LIMIT = 0.05
"""Of the traced peak, by which the memory model's may differ."""

FLUX = replace(
    BY_CLASS["flux-dev"],
    config=mini.CONFIG | {"single_blocks": 2},
    latents=((16, 32, 24),),
    text=(8, mini.CONFIG["context_width"]),
)
LAYERS, HIDDEN, TOKENS = 5, 128, 8 + 16 * 12
STATE = TOKENS * HIDDEN * 2
"""Bytes of a hidden state of FLUX's tokens."""


@pytest.mark.parametrize(
    ("real", "degrees"),
    [
        pytest.param(FLUX, Degrees(), id="one rank", marks=pytest.mark.full),
        pytest.param(FLUX, Degrees(tensor=2), id="tensor", marks=[pytest.mark.slow, pytest.mark.full]),
        pytest.param(FLUX, Degrees(patch=2, patch_mode="displaced"), id="patch", marks=[pytest.mark.slow, pytest.mark.full]),
        pytest.param(FLUX, Degrees(pipe=2), id="pipe", marks=pytest.mark.slow),
    ],
)
def test_few_blocks_give_the_figures_of_all(real, degrees):
    assert figures(real, degrees).figures == trace(real, degrees).figures


def sent(degrees):
    """Bytes of a step by rank and receiver."""
    return [
        {int(name.removeprefix("to ")): size for name, size in rank.items() if name.removeprefix("to ").isdigit()}
        for rank in trace(FLUX, degrees).figures
    ]


@pytest.mark.slow
def test_bytes_on_each_link():
    """Of a layer Ulysses sends four hidden states of half the tokens, half of each to the other rank; a ring two. Both send
    half of the tokens that leave the blocks. Tensor ranks add up twice in a double block and once in a single one."""
    assert sent(Degrees(ulysses=2)) == [{1: LAYERS * STATE + STATE // 2}, {0: LAYERS * STATE + STATE // 2}]
    assert sent(Degrees(ring=2)) == [{1: LAYERS * STATE + STATE // 2}, {0: LAYERS * STATE + STATE // 2}]
    first, second = sent(Degrees(tensor=2))
    assert first[1] == second[0] == (3 * 2 + 2) * STATE + (3 * 2 * 6 + 2 * 3) * HIDDEN
    piped = sent(Degrees(pipe=2))
    assert piped == [{1: STATE + HIDDEN * 2}, {}]  # a token in the place of words for the second band


def test_a_tensor_that_lives_longer_raises_the_peak(monkeypatch):
    """The control: what each block returns is kept until the model's end."""
    before, kept, made = trace(FLUX, Degrees()).figures[0]["peak"], [], loaded_stage.build_own_stage

    def keeping(*given):
        stage = made(*given)
        for block in stage.blocks.values():
            block.register_forward_hook(lambda _block, _given, out: kept.append(out))
        return stage

    monkeypatch.setattr(loaded_stage, "build_own_stage", keeping)
    assert trace(FLUX, Degrees()).figures[0]["peak"] > before + (LAYERS - 2) * STATE


def committed():
    return json.loads(NEWEST.read_text())["cases"]


@pytest.mark.parametrize("name", list(REAL_MODELS))
def test_one_rank_does_no_more_than_comfyuis_own_class(name, measured):
    native, (rank,) = json.loads(NEWEST.read_text())["native"][name], committed()[f"{name}, one rank"]["ranks"]
    for what in ("kernels", "moved"):
        measured(f"{what} of a step on one rank over native's, {name}", rank[what] / native[what])
        assert rank[what] <= 1.05 * native[what]


@pytest.mark.slow
def test_kernels_of_one_rank_are_those_of_the_result():
    """Of the first real model, traced now: a norm, a rotation or a gate that is taken apart again shows here."""
    name = next(iter(REAL_MODELS))
    (found,), (expected,) = figures(REAL_MODELS[name], Degrees()).figures, committed()[f"{name}, one rank"]["ranks"]
    assert {name: found[name] for name in ("kernels", "products", "moved")} == {
        name: expected[name] for name in ("kernels", "products", "moved")
    }


@pytest.mark.parametrize("name", list(REAL_MODELS))
def test_given_pictures_take_no_more_than_predicted(name, measured):
    """One set of figures is for any number of pictures, so it is the most of them: too much by 1.4, or by few bytes."""
    found, ratios_found, too_much = committed(), {}, {}
    for key, _, degrees in cases([name], (1, 2, 4, 8)):
        for at, rank in enumerate(with_predictions(name, degrees, found[key])["ranks"]):
            ratios_found[f"{key}, rank {at}"] = ratio = rank["predicted"] / rank["peak"]
            if ratio > 1.4 and rank["predicted"] - rank["peak"] > 50e6:
                too_much[f"{key}, rank {at}"] = ratio
    measured(f"predicted over traced memory of a run, {name}, most", max(ratios_found.values()))
    assert min(ratios_found.values()) >= 0.995
    assert too_much == {}


def test_a_model_that_was_not_traced_is_like_the_median_of_those_that_were():
    """On one rank it holds what it is said to. What each rank computes for the whole picture grows with the ranks."""
    states = typical(20.0)
    assert states.at(Degrees(), 0) == 20.0
    for axis in ("tensor", "ulysses", "ring", "patch"):
        ratios = sorted(getattr(each, axis)[-1] / getattr(each, axis)[0] for each in TRACED.values())
        at_eight = states.at(Degrees(**{axis: 8}, **({"patch_mode": "displaced"} if axis == "patch" else {})), 0) / 20.0
        assert ratios[0] < at_eight < ratios[-1]
        assert at_eight < 0.7 if axis == "tensor" else at_eight > 1.0


def test_comfyuis_own_class_has_the_figures_of_its_name(mini_file):
    opened = mini.opened(mini_file)
    family = replace(opened.family, model_class="WanModel", sizes=replace(opened.family.sizes, hidden=lambda _config: 5120))
    assert model_sizes(opened, "bf16", "cuda:0").traced is None
    found = model_sizes(replace(opened, family=family), "bf16", "cuda:0").traced
    assert found == TRACED["WanModel", 5120] != TRACED["WanModel", 3072]


def test_states_between_and_beyond_the_traced_ranks():
    states = TracedStates((10.0, 6.0, 4.0, 3.0), (10.0, 12.0, 12.0, 12.0), *((10.0,) * 4,) * 2, lists=(0.5, 1.0))
    assert states.at(Degrees(), 1) == 10.0
    assert states.at(Degrees(), 0) == 5.0
    assert states.at(Degrees(tensor=2, ulysses=2), 1) == 8.0
    assert states.at(Degrees(tensor=3), 1) == pytest.approx(6 - 2 * (1 / 2 - 1 / 3) / (1 / 2 - 1 / 4))
    assert states.at(Degrees(tensor=16), 1) == 3.0
    grows = replace(states, ulysses=(10.0, 12.0, 20.0, 40.0))
    assert grows.at(Degrees(ulysses=16), 1) == 80.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "degrees"), [(name, degrees) for name in REAL_MODELS for degrees in modes((1, 2, 4))], ids=str
)
def test_the_committed_result_is_what_ranks_do(name, degrees):
    (key,) = (key for key, of, at in cases([name], (degrees.world,)) if (of, at) == (name, degrees))
    expected, found = committed()[key]["ranks"], row(name, degrees)["ranks"]
    if degrees.pipe > 1:  # how many transfers are under way at the peak is a matter of the ranks' timing
        peaks = [rank.pop("peak") for rank in found]
        assert peaks == pytest.approx([rank["peak"] for rank in expected], rel=LIMIT)
    assert [{text: rank[text] for text in now} for rank, now in zip(expected, found, strict=True)] == found
