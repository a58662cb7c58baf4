"""The order in which bands' calls are posted, and how a run of bands ends, with a model that is no process at all."""

import itertools
import queue
import random
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.client.call import Conditioning, ModelCall, PostedCall, TokenLayout
from parallel_backend.client.pipefusion.banded_run import BandedRun, NotLocal, cut_rows, exact_above
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.step_cache import StepCache
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.pipefusion_order import MicroStep, micro_steps
from parallel_backend.core.spans import Span
from parallel_backend.own_class.built.built_class import built_class
from parallel_backend.own_class.calls.patching import Companion, Patching
from parallel_backend.processes.pool import POLL_SECONDS, RankLost
from testing import mini
from testing.models import Cancelled

FAMILY = built_class(mini.proven())
SHAPE = (1, 16, 12, 4)  # 6 rows of 2 tokens
PATCHING = Patching()
PATIENCE = 10.0
"""Seconds after which a run that should have ended counts as hanging."""


@dataclass
class Posted:
    """A call as the model got it."""

    tokens: Span
    with_text: bool
    timestep: float
    run: int
    conditioning: int


class FakeModel:
    """Answers a call with `2 * x + timestep` after a random time, calls one after the other, as the ranks do."""

    def __init__(self, seed: int = 0, delay: float = 0.002):
        self.built, self.posted, self.abandoned = FAMILY, [], []
        self.degrees = Degrees()
        self.error: Exception | None = None
        self.mute = False  # never answer
        self._known: list[Conditioning] = []
        self._random, self._delay = random.Random(seed), delay
        self._calls: queue.SimpleQueue[PostedCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def open_run(self, extrapolate: bool) -> int:
        return 1

    def watch_memory(self, run, bands, extrapolate, poll) -> None:
        pass

    def conditioning(self, call: ModelCall, layout: TokenLayout) -> Conditioning:
        for known in self._known:
            if known.matches(call, layout, call.tensors.keys()):
                return known
        order = self.built.token_order(layout.grid)
        number, text_tokens = len(self._known) + 1, 3 + layout.companion_tokens
        self._known.append(Conditioning(number, layout, order, text_tokens, 1, call.tensors))
        return self._known[-1]

    def post(self, call: PostedCall) -> None:
        assert call.x.shape[1] == len(call.tokens) + call.companion_tokens
        self.posted.append(Posted(call.tokens, call.with_text, float(call.timestep[0]), call.run, call.conditioning.id))
        self._calls.put(call)

    def abandon(self, run: int) -> None:
        self.abandoned.append(run)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(PATIENCE)

    def _answer(self) -> None:
        while (call := self._calls.get()) is not None:
            time.sleep(self._random.random() * self._delay)
            if self.error is not None:
                call.future.set_exception(self.error)
            elif not self.mute:
                call.future.set_result(2 * call.x + call.timestep[0])


@pytest.fixture
def model():
    model = FakeModel()
    yield model
    model.close()


def text(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"context": torch.full((1, 3, 2), value)}


def ends(function, *arguments):
    """What the function returns or raises; a failure, not a hang, if it does neither."""
    outcome = {}

    def work():
        try:
            outcome["value"] = function(*arguments)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the run hangs"
    assert not [t.name for t in threading.enumerate() if t.name.startswith("band")], "a band's thread is left over"
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def run_all(run, sample, poll=lambda: None):
    return ends(run_bands, run, sample, lambda: None, poll)


def band_call(run, band: int, at: float = 1.0, number: int = 0) -> ModelCall:
    return ModelCall(noise()[:, :, run.rows[band].slice], torch.tensor([at]), text(number))


def start(model, count: int = 3, warm_up: bool = False) -> BandedRun:
    return BandedRun(model, cut_rows(SHAPE, count, PATCHING), SHAPE, warm_up)


def noise() -> torch.Tensor:
    return torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float32).view(SHAPE)


def shuffled(run, exact, seed=0, conditionings=1):
    """A sampler for each band that makes these calls (`exact[k]`: call k is), each after a random time."""
    randoms = [random.Random(seed * 100 + band) for band in range(len(run.rows))]

    def sample(band):
        x = noise()[:, :, run.rows[band].slice]
        for call, whole in enumerate(exact):
            time.sleep(randoms[band].random() * 0.003)
            for number in range(conditionings):
                x = run.predict(band, ModelCall(x, torch.tensor([1.0 - call / 10]), text(number)), whole)
        return x

    return sample


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("exact", [[False] * 4, [True] * 3, [True, False, False], [True, False, True, False]])
def test_the_order_is_the_schedules_whatever_the_timing(model, exact, seed):
    run = start(model)
    parts = run_all(run, shuffled(run, exact, seed))
    whole = Span(0, 12)
    posted = [
        MicroStep(round(10 * (1 - p.timestep)), None if p.tokens == whole else p.tokens.start // 4) for p in model.posted
    ]
    assert posted == micro_steps(exact, 3)
    assert all(p.with_text == (p.tokens.start == 0) for p in model.posted)
    assert (run.exact_calls, run.banded_calls) == (sum(exact), len(exact) - sum(exact))
    expected = noise()
    for call in range(len(exact)):
        expected = 2 * expected + torch.tensor(1.0 - call / 10)
    assert torch.equal(torch.cat(parts, dim=2), expected)


def test_an_answer_does_not_wait_for_a_call_that_is_being_made(model):
    """Whoever makes it may wait for memory, and so for what the thread that has the answer brings next."""
    calls, waited, post = [], [], model.post

    def answering(call: PostedCall) -> None:
        if not calls:
            calls.append(call)
            return
        answer = threading.Thread(target=calls[0].future.set_result, args=(2 * calls[0].x,), daemon=True)
        answer.start()
        answer.join(1)
        waited.append(answer.is_alive())
        post(call)

    model.post = answering
    run = start(model, 2)
    run_all(run, lambda band: run.predict(band, band_call(run, band), False))
    assert waited == [False]


@pytest.mark.parametrize("exact", [True, False])
def test_a_companion_latent_goes_with_the_first_band(model, exact):
    """And is forecast with it: with times on a line the fourth call is."""
    patching = Patching(video=True, companion=Companion("b c s t -> b (s t) c", (32, 2, 3)))
    model.built = replace(FAMILY)
    vars(model.built)["patching"] = patching
    x, sound = torch.randn(1, 16, 2, 5, 6), torch.randn(1, 32, 2, 3)
    rows, cache = cut_rows(tuple(x.shape), 3, patching), StepCache(0.5, 3)
    run = BandedRun(
        model,
        rows,
        tuple(x.shape),
        warm_up=False,
        cache=cache,
        companion_tokens=patching.companion.tokens(sound.shape),
    )

    def sample(band):
        own = patching.band((x, sound), rows[band])
        return [
            run.predict(band, ModelCall(own, torch.tensor([1.0 - call / 10]), text()), exact and call == 0)
            for call in range(5)
        ]

    results = run_all(run, sample)
    assert cache.forecast
    for call in range(5):
        found = patching.join([result[call] for result in results])
        for got, latent in zip(found, (x, sound), strict=True):
            assert torch.allclose(got, 2 * latent + 1.0 - call / 10, atol=1e-4)
    assert not any(result[0][1].numel() for result in results[1:])


def test_with_warm_up_the_first_call_of_every_conditioning_is_exact(model):
    """Unconditional and conditional calls alternate; neither may read keys that nobody has written."""
    run = start(model, 3, warm_up=True)
    run_all(run, shuffled(run, [False] * 3, conditionings=2))
    assert (run.exact_calls, run.banded_calls) == (2, 4)
    assert [len(p.tokens) for p in model.posted] == [12, 12] + [4] * 12
    assert [p.conditioning for p in model.posted] == [1, 2] + [1, 1, 1, 2, 2, 2] * 2


def test_conditioning_that_had_no_call_at_a_timestep_is_exact_again(model):
    """As when guidance is on for some of the steps. Calls at one timestep count once."""
    run = start(model, 3, warm_up=True)
    calls = [(0.9, 0), (0.9, 1), (0.9, 0), (0.8, 0), (0.8, 1), (0.7, 0), (0.6, 0), (0.6, 1), (0.5, 1)]

    def sample(band):
        for time_, number in calls:
            run.predict(band, band_call(run, band, time_, number), False)

    run_all(run, sample)
    exact = [(round(p.timestep, 1), p.conditioning - 1) for p in model.posted if len(p.tokens) == 12]
    assert exact == [(0.9, 0), (0.9, 1), (0.6, 1)]


@pytest.mark.parametrize("short", [0, 1, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_bands_that_make_different_numbers_of_calls_are_not_local(model, short, exact):
    run = start(model)

    def sample(band):
        for call in range(2 + (band != short)):
            run.predict(band, band_call(run, band, 1.0 - call / 10), exact)

    with pytest.raises(NotLocal, match="number of model calls"):
        run_all(run, sample)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_bands_at_different_timesteps_are_not_local(model, other, exact):
    run = start(model)

    def sample(band):
        for call in range(3):
            timestep = 1.0 - call / 10 - (0.01 if call == 1 and band == other else 0)
            run.predict(band, band_call(run, band, timestep), exact)

    with pytest.raises(NotLocal, match="different timesteps"):
        run_all(run, sample)
    assert model.abandoned == [1]


@pytest.mark.parametrize("band", [0, 1, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_an_exception_in_one_band_ends_all(model, band, exact):
    run = start(model)

    def sample(me):
        for call in range(50):
            if (me, call) == (band, 2):
                raise KeyError("the sampler's own")
            run.predict(me, band_call(run, me, 1.0 - call / 100), exact)

    with pytest.raises(KeyError, match="the sampler's own"):
        run_all(run, sample)


@pytest.mark.parametrize("stages", [2, 1])
@pytest.mark.parametrize("lost_at", range(4))
def test_calls_under_way_are_made_again_on_other_ranks(model, lost_at, stages):
    """Exact for a conditioning without keys there; from then on too, if a single stage is left."""
    other = FakeModel()
    other.degrees = Degrees(pipe=stages)
    run = BandedRun(model, cut_rows(SHAPE, 3, PATCHING), SHAPE, warm_up=False, is_kept=True)
    post = model.post

    def failing(call: PostedCall) -> None:
        if len(model.posted) == 3 * lost_at + 1:
            model.error = RankLost("lost")
        post(call)

    def poll() -> None:
        if run.lost is not None:
            run.go_on(other, None, lambda: None)

    model.post = failing
    parts = run_all(run, shuffled(run, [False] * 5), poll)
    other.close()
    expected = noise()
    for call in range(5):
        expected = 2 * expected + torch.tensor(1.0 - call / 10)
    assert torch.equal(torch.cat(parts, dim=2), expected)
    assert run.lost is None
    lengths = [len(posted.tokens) for posted in other.posted]
    assert lengths[0] == 12
    assert set(lengths[1:]) <= ({4} if stages > 1 else {12})
    assert {posted.run for posted in other.posted} == ({1} if stages > 1 else {0})


def test_cancel_ends_a_run_whose_ranks_are_lost(model):
    model.error = RankLost("lost")
    run = BandedRun(model, cut_rows(SHAPE, 3, PATCHING), SHAPE, warm_up=False, is_kept=True)

    def cancel() -> None:
        if run.lost is not None:
            raise Cancelled

    with pytest.raises(Cancelled):
        run_all(run, shuffled(run, [False] * 3), cancel)


@pytest.mark.parametrize("mute", [False, True])
@pytest.mark.parametrize("where", ["poll", "on_event"])
def test_cancel_ends_all_threads(model, where, mute):
    model.mute = mute
    run = start(model)
    counter = itertools.count()

    def cancel():
        if next(counter) == 3:
            raise Cancelled

    hooks = {"poll": lambda: None, "on_event": lambda: None} | {where: cancel}
    with pytest.raises(Cancelled):
        ends(run_bands, run, shuffled(run, [False] * 1000), hooks["on_event"], hooks["poll"])
    assert len(model.posted) < 3000


def test_poll_runs_on_the_calling_thread_and_samples_in_inference_mode(model):
    run = start(model)
    caller, seen = [], set()

    def everything():
        caller.append(threading.get_ident())
        return run_bands(run, sample, lambda: seen.add(threading.get_ident()), lambda: seen.add(threading.get_ident()))

    def sample(band):
        time.sleep(3 * POLL_SECONDS)
        return band, torch.is_inference_mode_enabled(), threading.get_ident()

    results = ends(everything)
    assert [result[:2] for result in results] == [(0, True), (1, True), (2, True)]
    assert seen == set(caller)
    assert len({result[2] for result in results} | seen) == 4


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_first_steps_are_exact_and_no_others(steps):
    """Calls at a step's own noise, and second ones half-way to the next step, which belong to the step they are made in."""
    sigmas = torch.linspace(1.0, 0.0, steps + 1)
    for warm_up in range(steps + 3):
        limit = exact_above(sigmas, warm_up)
        for step, (sigma, following) in enumerate(itertools.pairwise(sigmas.tolist())):
            assert [at > limit for at in (sigma, (sigma + following) / 2)] == [step < warm_up] * 2
    assert float(sigmas[0]) * (1 + 1e-7) <= exact_above(sigmas, 0)  # a timestep that was rounded on its way is the step's


@given(st.integers(1, 300), st.integers(1, 20), st.sampled_from([1, 2, 4]))
def test_cut_rows(height, count, patch):
    rows = cut_rows((1, 16, height, 8), count, Patching(side=patch))
    assert [row for span in rows for row in range(span.start, span.stop)] == list(range(height))
    assert len(rows) == min(count, -(-height // patch))
    assert all(len(span) for span in rows)
    assert all(span.start % patch == 0 for span in rows)
    tokens = [-(-len(span) // patch) for span in rows]
    assert max(tokens) - min(tokens) <= 1


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 2000))
def test_the_first_band_has_fewer_rows_for_the_text_that_it_carries(rows, count, text):
    """No other cut has a shorter longest band, counted with the text, with at least half of its share for the first."""
    row, shape = 16, (1, 16, 2 * rows, 32)
    bands = [len(span) // 2 for span in cut_rows(shape, count, PATCHING, text)]
    assert sum(bands) == rows and len(bands) == min(count, rows)
    first, *others = bands
    if not others:
        return
    most = max(first + text / row, *others)
    assert first >= rows / len(bands) / 2
    assert max(others) - min(others) <= 1
    for other in range(-(-rows // (2 * len(bands))), rows - len(others) + 1):
        assert most <= max(other + text / row, -(-(rows - other) // len(others))) + 1e-9
