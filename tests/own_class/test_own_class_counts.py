"""Tokens and operations of a class's calls, counted without values."""

import math
from dataclasses import replace

import pytest

from parallel_backend.own_class.built.built_class import built_class
from parallel_backend.own_class.built.counts import Work, counted, counts_of
from parallel_backend.own_class.calls.call_arguments import to_tensors
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.planted_classes import WIDTH
from tests.own_class.test_own_class import TIMES, call
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")

CELLS, WORDS = 2 * 4 * 6, 5
"""Of `call`."""


def proven(name: str, bands: bool = True):
    proof = trial(planted(name), call(), TIMES, sequence=bands, bands=bands)
    return replace(planted(name), blocks=proof.blocks, latent=proof.latent)


def tensors_of(given):
    return to_tensors(given.named, given.timestep, given.x.shape[1:])


def test_operations_are_those_of_its_layers_and_attention():
    counts = counted(own := proven("Tokens"), call())
    assert counts is not None
    assert counts.streams == {0: CELLS}
    assert counts.states == CELLS * WIDTH
    layers = 2 * CELLS * (4 * WIDTH * WIDTH) + 2 * WIDTH * 2 * WIDTH  # q, k, v, out; modulation of one entry
    assert counts.blocks == (Work(layers, 4 * CELLS * CELLS * WIDTH),) * len(own.blocks)
    assert 0.5 < counts.shared < 1


@pytest.mark.parametrize(("name", "others"), [("TwoStreams", WORDS), ("FillsUp", 16)])
def test_a_request_has_the_tokens_that_a_class_makes(name, others):
    own, given = proven(name), call()
    built = built_class(own)
    grid = built.patching.grid(tuple(given.x.shape))
    found = built.counted(grid, 1, tensors_of(given))
    counts = counts_of(own, tensors_of(given))
    assert found.grid == grid
    assert found.text == sum(tokens for _, tokens in found.streams) == sum(counts.streams.values()) - math.prod(grid)
    assert found.text == others


def test_an_exact_call_counts_tokens_and_no_cells_of_the_latent():
    """Nothing is known of how tokens are made of it."""
    own, given = proven("TwoRows", bands=False), call()
    built = built_class(own)
    assert built.patching.grid(tuple(given.x.shape)) == given.x.shape[2:]
    found = built.counted(tuple(given.x.shape[2:]), 1, tensors_of(given))
    assert math.prod(found.grid) == CELLS // 4
    assert found.text == 0


def test_a_class_that_looks_at_values_is_not_counted():
    own, given = proven("Tokens"), call()
    looks = replace(given, named={**given.named, "context": given.named["context"][..., :1]})
    assert counted(own, looks) is None
    built = built_class(own)
    assert built.counted((1, 2, 3), 5, tensors_of(looks)) == ((1, 2, 3), 5, (), 0)
