"""Traces of models on hollow devices: exact on tiny ones, and the memory model's ratios."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sizes.real_models import FLUX_DEV
from benchmarks.sizes.states import RANKS, on_axis, ratios
from benchmarks.sizes.trace import trace
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.placement.memory_model import Request, memory_of, states_by_ranks
from parallel_backend.placement.model_sizes import model_sizes
from testing import mini

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
OF_ALL = max(RESULTS.glob("real_sizes_2*.json"))

FLUX = replace(
    FLUX_DEV,
    config=mini.CONFIG | {"single_blocks": 2},
    latent=(16, 32, 24),
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


def test_the_memory_models_ratios_are_near_the_medians_of_the_traced_models():
    for axis, medians in ratios(json.loads(OF_ALL.read_text())["cases"]).items():
        predicted = [states_by_ranks(on_axis(axis, count)) for count in RANKS]
        assert predicted == pytest.approx(list(medians), rel=0.2), axis


def test_several_ranks_are_predicted_by_the_ratios(mini_file):
    opened, request = mini.opened(mini_file), Request(grid=(64, 64), references=0, text=0, entries=1)
    sizes = model_sizes(opened, "bf16", "cpu")
    whole = (Span(0, len(sizes.block_bytes)),)
    one, eight = (memory_of(sizes, Degrees(tensor=count), whole, 0, (request,)).activations for count in (1, 8))
    assert eight / one == pytest.approx(states_by_ranks(Degrees(tensor=8)), rel=1e-3)
