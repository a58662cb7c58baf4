"""Traces of models on hollow devices: exact on tiny ones; the result of real ones, and the memory model's ratios."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sizes.states import ratios
from benchmarks.sizes.table import cases, modes, row
from benchmarks.sizes.trace import figures, trace
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.placement.memory_model import BY_RANKS, Request, memory_of
from parallel_backend.placement.model_sizes import model_sizes
from parallel_backend.rank import loaded_stage
from testing import mini
from testing.real_sizes import BY_CLASS, REAL_MODELS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NEWEST = max(RESULTS.glob("real_sizes_references_*.json"))
OF_ALL = max(RESULTS.glob("real_sizes_2*.json"))
LIMIT = 0.05
"""Of a peak in a pipeline, by which two traces may differ."""

FLUX = replace(
    BY_CLASS["flux-dev"],
    config=mini.CONFIG | {"single_blocks": 2},
    latents=((16, 32, 24),),
    text=(8, mini.CONFIG["context_width"]),
)
LAYERS, HIDDEN, TOKENS = 5, 128, 8 + 16 * 12
STATE = TOKENS * HIDDEN * 2
"""Bytes of a hidden state of FLUX's tokens."""


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


@pytest.mark.slow
def test_kernels_of_one_rank_are_those_of_the_result():
    """Of the first real model, traced now: a norm, a rotation or a gate that is taken apart again shows here."""
    name = next(iter(REAL_MODELS))
    (found,), (expected,) = figures(REAL_MODELS[name], Degrees()).figures, committed()[f"{name}, one rank"]["ranks"]
    assert {name: found[name] for name in ("kernels", "products", "moved")} == {
        name: expected[name] for name in ("kernels", "products", "moved")
    }


def test_the_memory_models_ratios_are_the_medians_of_the_traced_models():
    assert ratios(json.loads(OF_ALL.read_text())["cases"]) == BY_RANKS


def test_several_ranks_are_predicted_by_the_ratios(mini_file):
    opened, request = mini.opened(mini_file), Request(grid=(64, 64), references=0, text=0, entries=1)
    sizes = model_sizes(opened, "bf16", "cpu")
    whole = (Span(0, len(sizes.block_bytes)),)
    one, eight = (memory_of(sizes, Degrees(tensor=count), whole, 0, (request,)).activations for count in (1, 8))
    assert eight / one == pytest.approx(BY_RANKS["tensor"][-1], rel=1e-3)


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
