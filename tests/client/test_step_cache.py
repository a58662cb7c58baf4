"""Which calls the step cache forecasts, and that every mode and any timing of bands comes to the same decisions."""

import random
import time
from collections.abc import Callable

import pytest
import torch

from parallel_backend.client import step_cache
from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.banded_run import BandedRun, NotLocal, cut_rows
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.client.step_cache import FIRST_COMPUTED, LONGEST_ROW, Computed, Forecast, StepCache
from parallel_backend.core.degrees import Degrees
from testing import mini
from tests.client.test_banded_run import PATCHING, SHAPE, FakeModel, band_call, noise, run_all, start, text

Output = Callable[[float], torch.Tensor]
BANDED_FIRST = FIRST_COMPUTED + 1
"""Calls that are always computed in bands, where the last one's quality is not known yet."""


def decisions(cache: StepCache) -> list[str]:
    """`log[k]`: '#' where call k was computed, '.' where it was forecast; filled while the cache is used."""
    log, ask = [], cache.call

    def call(*arguments):
        entry = ask(*arguments)
        log.append("." if isinstance(entry, Forecast) else "#")
        return entry

    cache.call = call
    return log


def follow(cache: StepCache, output: Output, times: list[float], allowed: Callable[[float], bool] = lambda time: True):
    """One conditioning's calls at `times`: the decisions, and the outputs."""
    log, outputs = decisions(cache), []
    for at in times:
        entry = cache.call(1, at, allowed(at))
        if isinstance(entry, Computed):
            entry.outputs[0] = (output(at),)
            outputs.append(entry.outputs[0][0])
        else:
            outputs.append(entry.output()[0])
    return "".join(log), outputs


TIMES = [1 - step / 20 for step in range(20)]


def line(at: float) -> torch.Tensor:
    return torch.tensor([1.0, 2.0]) + at * torch.tensor([-3.0, 0.5])


def parabola(at: float) -> torch.Tensor:
    return torch.tensor([1.0, 2.0]) + at**2 * torch.tensor([-3.0, 0.5])


def test_a_line_is_forecast_exactly_and_never_for_long():
    log, outputs = follow(StepCache(0.01), line, TIMES)
    assert log.startswith("#" * FIRST_COMPUTED + "..#")  # two calls as far as the line's base reaches
    assert ("." * LONGEST_ROW + "#") * 3 in log
    assert "." * (LONGEST_ROW + 1) not in log
    assert all(torch.allclose(output, line(at), atol=1e-5) for output, at in zip(outputs, TIMES, strict=True))


@pytest.mark.parametrize("times", [TIMES, [1000 * at for at in TIMES]], ids=["0..1", "0..1000"])
def test_a_larger_threshold_forecasts_more_and_worse(times):
    def output(at):
        return parabola(at / times[0])

    runs = {threshold: follow(StepCache(threshold), output, times) for threshold in (0.0, 0.01, 0.05, 0.2)}
    forecasts = [log.count(".") for log, _ in runs.values()]
    assert forecasts[0] == 0
    assert sorted(set(forecasts)) == forecasts
    errors = [
        max(float((got - output(at)).norm() / output(at).norm()) for got, at in zip(outputs, times, strict=True))
        for _, outputs in runs.values()
    ]
    assert sorted(errors) == errors
    assert all(0 < error < 2 * threshold for error, threshold in zip(errors[1:], list(runs)[1:], strict=True))


def test_noise_is_not_forecast():
    generator = torch.Generator().manual_seed(0)
    log, _ = follow(StepCache(0.3), lambda at: torch.randn(64, generator=generator), TIMES)
    assert log == "#" * len(TIMES)


def test_errors_add_up_to_the_next_computed_call(monkeypatch):
    monkeypatch.setattr(step_cache._History, "expected_error", lambda self, time: 0.06 if self.forecast(time) else 1.0)
    log, _ = follow(StepCache(0.1), line, TIMES)  # one is below the threshold, two are above it
    assert "." in log
    assert ".." not in log
    assert ".." in follow(StepCache(0.2), line, TIMES)[0]


def cached(model, bands: int, seed: int, steps: int = 12, threshold: float = 0.2, warm_up: int = 1):
    """Euler on the fake model, bands at random times: what was posted, decided and sampled."""
    cache = StepCache(threshold, bands)
    log = decisions(cache)
    run = BandedRun(model, cut_rows(SHAPE, bands, PATCHING), SHAPE, True, cache=cache)
    randoms = [random.Random(seed * 100 + band) for band in range(bands)]

    def sample(band):
        x = noise()[:, :, run.rows[band].slice] / 100
        for step in range(steps):
            time.sleep(randoms[band].random() * 0.003)
            x = x - 0.1 * run.predict(band, ModelCall(x, torch.tensor([1 - step / 20]), text()), step < warm_up)
        return x

    parts = run_all(run, sample)
    return model.posted, "".join(log), torch.cat(parts, dim=2), run


@pytest.mark.parametrize("bands", [1, 3])
def test_bands_decide_the_same_whatever_the_timing(bands):
    runs = []
    for seed in range(4):
        model = FakeModel(seed)
        runs.append(cached(model, bands, seed))
        model.close()
    posted, log, sample, run = runs[0]
    assert 2 < log.count(".") < 8
    assert run.exact_calls + run.banded_calls == log.count("#")
    assert len(posted) == 1 + bands * (log.count("#") - 1)
    assert not run._forecasts  # answered to all, and forgotten
    for other in runs[1:]:
        assert (other[0], other[1]) == (posted, log)
        assert torch.equal(other[2], sample)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_bands_that_make_different_numbers_of_forecast_calls_are_not_local(short):
    model = FakeModel(delay=0.0)
    run = start(model)
    run.cache = StepCache(1e9, 3)

    def sample(band):
        for step in range(BANDED_FIRST + (1 if band == short else 2)):
            run.predict(band, band_call(run, band, 1 - step / 20), False)

    with pytest.raises(NotLocal, match="number of model calls"):
        run_all(run, sample)
    model.close()


STEPS = 10
THRESHOLD = 0.2


@pytest.fixture(scope="module")
def problem():
    noise, _, positive = mini.inputs(height=16, width=12)
    negative = mini.inputs(height=16, width=12, seed=2)[2]
    return noise, linear_sigmas(STEPS), Prompt(positive, negative, 3.0)


def sampled(model: RemoteTransformer, problem, bands: int = 0, threshold: float = THRESHOLD) -> tuple[str, torch.Tensor]:
    """`bands` 0: whole calls. Threshold 0: without a cache."""
    cache = StepCache(threshold, max(1, bands)) if threshold else None
    log = decisions(cache) if cache else []
    if bands:
        sample = sample_in_bands(model, *problem, bands, warm_up=1, cache=cache)[0]
    else:
        sample = sample_whole(model, *problem, cache=cache)
    return "".join(log), sample


@pytest.fixture(scope="module")
def alone(remote, problem):
    """On one rank."""
    log, sample = sampled(remote(Degrees()), problem)
    assert 1 < log.count(".") < STEPS - BANDED_FIRST
    return log, sample


@pytest.mark.parametrize("degrees", [Degrees(ulysses=2), Degrees(batch=2), Degrees(pipe=2), Degrees(tensor=2)], ids=str)
def test_exact_modes_decide_and_give_the_same(remote, problem, alone, degrees):
    log, sample = sampled(remote(degrees), problem)
    assert log == alone[0]
    assert mini.relative(sample, alone[1]) <= 1e-5


def test_pipefusion_decides_the_same_for_two_and_four_stages(remote, problem):
    log, sample = sampled(remote(Degrees(pipe=2)), problem, bands=4)
    assert 1 < log.count(".") < STEPS - BANDED_FIRST
    again, repeated = sampled(remote(Degrees(pipe=2)), problem, bands=4)
    assert again == log
    assert torch.equal(repeated, sample)
    four, sample_of_four = sampled(remote(Degrees(pipe=4)), problem, bands=4)
    assert four == log
    assert mini.relative(sample_of_four, sample) <= 1e-5
    log, uncached = sampled(remote(Degrees(pipe=2)), problem, bands=4, threshold=1e-9)
    assert log == "#" * STEPS
    assert torch.equal(uncached, sampled(remote(Degrees(pipe=2)), problem, bands=4, threshold=0)[1])
    assert 1e-6 < mini.relative(sample, uncached) < 0.1


class EverySecond(StepCache):
    """Forecasts every second call, whatever it takes it for."""

    def _decide(self, conditionings, time):
        self._skip = not self._skip


def test_old_keys_are_moved_on_over_a_forecast_call(remote, problem):
    """In bands the cached run is closer to the cached whole one than with keys as they were two steps ago."""
    model = remote(Degrees())
    whole = sample_whole(model, *problem, cache=EverySecond(0.0))
    moved, old = (
        mini.relative(sample_in_bands(model, *problem, 3, 1, extrapolate=on, cache=EverySecond(0.0, 3))[0], whole)
        for on in (True, False)
    )
    assert moved < 0.7 * old
