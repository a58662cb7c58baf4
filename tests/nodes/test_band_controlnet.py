"""One ControlNet serves all bands of a run: what it sees of each of them, and that none waits for a band that failed."""

import threading
from dataclasses import dataclass, field

import pytest
import torch

from parallel_backend.client.pipefusion.band_cut import BandCut
from parallel_backend.client.pipefusion.banded_run import cut_rows
from parallel_backend.own_class.calls.patching import Patching

PATIENCE = 20.0
"""Seconds after which a run that should have ended counts as hanging."""


@dataclass
class FakeControlNet:
    """Answers with the tokens of what it saw, number of call in front, as a native model with `patching` would have them."""

    patching: Patching
    seen: list[torch.Tensor] = field(default_factory=list)

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        self.seen.append(x_noisy)
        if len(self.seen) == 3:
            return None
        tokens = self.patching.pack(x_noisy)
        order = self.patching.order(self.patching.grid(tuple(x_noisy.shape)))
        tokens = tokens if order is None else tokens[:, torch.argsort(order)]
        return {"input": [tokens, None, tokens, tokens + 1], "middle": [], "output": [tokens + 1]}


BANDS, TURNS = 3, 5


def run_control(shared, shape, sample=None) -> list:
    """What each band got, by turn; or the error that it ended with."""
    results: list = [None] * BANDS

    def default(band: int) -> list:
        return [ask(shared, band, latent_of(shape, band, turn), 1.0 - turn / 10) for turn in range(TURNS)]

    def work(band: int) -> None:
        try:
            results[band] = (sample or default)(band)
            shared.finish(band)
        except BaseException as error:
            shared.close(error)
            results[band] = error

    threads = [threading.Thread(target=work, args=(band,), daemon=True) for band in range(BANDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a band hangs"
    return results


def ask(shared, band: int, x: torch.Tensor, sigma: float, call: str = "positive"):
    return shared.band(band).get_control(x, torch.tensor([sigma]), {}, 1, {"uuids": [call]})


def latent_of(shape, band: int, turn: int) -> torch.Tensor:
    """A band's rows, of values that say which band's and which turn's they are."""
    rows = cut_rows(shape, BANDS, PATCHINGS[len(shape)])[band]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(turn))
    return whole[..., rows.slice, :]


PATCHINGS = {4: Patching(), 5: Patching(video=True)}
SHAPES = [(1, 4, 12, 6), (2, 4, 11, 5), (1, 4, 3, 12, 6)]


@pytest.fixture
def shared_control(module):
    """`shared_control(shape, exact_above, extrapolate)`: a FakeControlNet, and what shares it."""

    def make(shape, exact_above, extrapolate=False):
        patching = PATCHINGS[len(shape)]
        net, cut = FakeControlNet(patching), BandCut(patching, cut_rows(shape, BANDS, patching), (shape,))
        banded = module("sampling.band_controlnet").BandedControl(net, cut, exact_above, extrapolate, torch.device("cpu"))
        return net, banded

    return make


@pytest.mark.parametrize("exact_above", [0.85, -1.0, float("inf")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_sees_band_0_as_it_is_and_the_others_as_they_were(shared_control, shape, exact_above):
    net, shared = shared_control(shape, exact_above)
    got = run_control(shared, shape)
    patching = PATCHINGS[len(shape)]
    for turn, seen in enumerate(net.seen):
        exact = turn == 0 or 1.0 - turn / 10 > exact_above
        others = turn if exact else turn - 1
        expected = [latent_of(shape, band, turn if band == 0 else others) for band in range(BANDS)]
        assert torch.equal(seen, torch.cat(expected, -2))
        if turn == 2:
            assert all(answers[turn] is None for answers in got)
            continue
        # Side by side, the bands' parts in the stream's order are the whole in that order.
        parts = []
        for band in range(BANDS):
            answer = got[band][turn]["input"]
            assert answer[0] is answer[2] and answer[1] is None and torch.equal(answer[3], got[band][turn]["output"][0])
            order = patching.order(patching.grid(tuple(latent_of(shape, band, 0).shape)))
            parts.append(answer[0] if order is None else answer[0][:, order])
        assert torch.equal(torch.cat(parts, 1), patching.pack(seen))
    assert len(net.seen) == TURNS


TIMES = {"euler": (1.0, 0.8, 0.7, 0.5, 0.3), "heun": (1.0, 0.8, 0.8, 0.7, 0.7, 0.5, 0.5)}


@pytest.mark.parametrize("extrapolate", [True, False])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_sees_the_others_moved_on_to_the_present_time(shared_control, shape, times, extrapolate):
    """Latents on a straight line: but in the second step, when there is no line yet, they are seen as they are now."""
    start, way = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    net, shared = shared_control(shape, float("inf"), extrapolate=extrapolate)
    rows = cut_rows(shape, BANDS, PATCHINGS[len(shape)])

    def sample(band):
        for time in times:
            ask(shared, band, (start + way * time)[..., rows[band].slice, :], time)

    assert run_control(shared, shape, sample) == [None] * BANDS
    for turn, (seen, time) in enumerate(zip(net.seen, times, strict=True)):
        now = start + way * time
        assert torch.equal(seen[..., rows[0].slice, :], now[..., rows[0].slice, :])
        known = turn == 0 or times[turn - 1] == time or (extrapolate and times[turn - 1] != 1.0)
        assert torch.allclose(seen, now, atol=1e-5) == known, turn


@pytest.mark.parametrize("band", range(BANDS))
@pytest.mark.parametrize("exact_above", [-1.0, float("inf")])
def test_a_band_that_fails_elsewhere_leaves_none_waiting(shared_control, band, exact_above):
    _, shared = shared_control(SHAPES[0], exact_above)

    def sample(me):
        for turn in range(TURNS):
            if (me, turn) == (band, 2):
                raise KeyError("the sampler's own")
            ask(shared, me, latent_of(SHAPES[0], me, turn), 0.5)

    results = run_control(shared, SHAPES[0], sample)
    assert isinstance(results[band], KeyError)
    assert all(result is None or isinstance(result, KeyError) for result in results)
    assert isinstance(results[0], KeyError)  # it waits for all others
