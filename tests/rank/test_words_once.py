"""Words that are the same in all calls run once in a run, and in every call where what is kept may not be used."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.core.spans import Span
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.call_arguments import to_tensors
from parallel_backend.own_class.calls.tried_calls import Call, draw_weights
from parallel_backend.own_class.trials.trial import trial
from parallel_backend.rank.words_once import WordsOnce
from parallel_backend.wire import messages as m
from tests.support.one_rank import OneRank
from tests.support.planted_comfyui import planted, planted_comfyui

BOTH, FIRST, SECOND = Span(0, 2), Span(0, 1), Span(1, 2)
WORDS, GRID = 5, (2, 4, 6)


def step(seq, conditioning=1, entries=BOTH, run=0, with_text=True, residuals=None):
    """A micro-step of the whole latent."""
    sizes = {"tokens": Span(0, 48), "timestep": torch.ones(2), "x": torch.zeros(2, 48, 4)}
    told = {"run": run, "conditioning": conditioning, "entries": entries, "with_text": with_text}
    return m.Step(seq=seq, stale=False, overlap=True, residuals=residuals or (), added=(), **told, **sizes)


@pytest.fixture
def words():
    return WordsOnce()


def have_words(words, *steps):
    return [words.of(each).with_text for each in steps]


def test_each_entry_s_words_run_once_for_a_conditioning_and_a_run(words):
    steps = step(1, entries=FIRST), step(2, entries=FIRST), step(3, entries=SECOND), step(4), step(5, 2), step(6, run=1)
    assert have_words(words, *steps) == [True, False, True, False, True, True]


def test_a_micro_step_that_was_looked_at_is_decided_once(words):
    assert have_words(words, step(1), step(2), step(2), step(3)) == [True, False, False, False]


def test_words_that_some_entries_lack_run_for_all_of_the_micro_step(words):
    assert have_words(words, step(1, entries=FIRST), step(2), step(3)) == [True, True, False]


@pytest.mark.parametrize(("run", "again"), [(0, False), (1, True)])
def test_a_control_has_its_own_words(words, run, again):
    """In a run of bands the K/V buffer then has those."""
    controlled = step(2, run=run, residuals=(("input.0", 0),))
    assert have_words(words, step(1, run=run), controlled, step(3, run=run)) == [True, True, again]


@pytest.mark.parametrize(
    ("drop", "again"),
    [
        pytest.param(lambda words: words.close_run(1), (True, True, True), id="the run ends"),
        pytest.param(lambda words: words.close_run(2), (True, True, False), id="another run ends"),
        pytest.param(lambda words: words.drop_conditioning(1), (True, False, True), id="the conditioning goes"),
        pytest.param(lambda words: words.drop_conditioning(2), (False, True, False), id="another conditioning goes"),
        pytest.param(lambda words: words.forget(), (True, True, True), id="weights change"),
    ],
)
def test_what_ends_has_its_words_run_again(words, drop, again):
    """Of two conditionings outside of runs, and one in run 1."""
    kinds: tuple[dict[str, int], ...] = ({}, {"conditioning": 2}, {"run": 1})
    for seq, kind in enumerate(kinds):
        words.of(step(seq, **kind))
    drop(words)
    assert tuple(have_words(words, *(step(10 + seq, **kind) for seq, kind in enumerate(kinds)))) == again


class Rank(OneRank):
    """Of a planted class, with conditioning 1."""

    def __init__(self, path):
        own, g = planted("Prefixed"), torch.Generator().manual_seed(0)
        draw_weights(model := build(own), 7)
        save_file(dict(model.state_dict()), path)
        given = {"context": torch.randn(2, WORDS, 16, generator=g)}
        self.call = Call(torch.randn(2, 4, *GRID, generator=g), torch.full((2,), 700.0), given)
        proof = trial(own, self.call, (900.0,), bands=True)
        super().__init__(path, opened=open_own_class(path, replace(own, blocks=proof.blocks, latent=proof.latent)))
        self.prompt(given["context"])

    def prompt(self, context):
        self.put(self.call.x, to_tensors({"context": context}, self.call.timestep, self.call.x.shape[1:]))

    def computed(self, time):
        return self.step(self.call.x * time, self.call.timestep * time)


@pytest.fixture
def rank(tmp_path):
    with planted_comfyui():
        yield Rank(tmp_path / "own.safetensors")


def test_a_conditioning_in_the_place_of_another_has_its_own_words(rank):
    before = rank.computed(1.0)
    rank.prompt(torch.ones(2, WORDS, 16))
    other = rank.computed(1.0)
    assert not torch.equal(other, before)
    rank.engine.drop_conditioning(1)
    rank.prompt(rank.call.named["context"])
    assert torch.equal(rank.computed(1.0), before)


def test_changed_weights_have_the_words_run_again(rank):
    rank.computed(1.0)
    before, name = rank.computed(0.8), "text.weight"
    shape = rank.engine.stage.model.get_parameter(name).shape
    rank.engine.stage.adapters.add(m.Adapt(name, 0.1 * torch.ones(shape), None, 1.0))
    rank.engine.adapted()
    assert not torch.equal(before, rank.computed(0.8))
    rank.engine.stage.adapters.drop()
    rank.engine.adapted()
    assert torch.equal(rank.computed(0.8), before)
