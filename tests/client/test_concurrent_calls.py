"""Calls of different conditioning under way together, on replicas of their own: the same bits as one after the other."""

import itertools

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows, exact_above
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.sampling import linear_sigmas
from parallel_backend.core.degrees import Degrees
from testing import mini

pytestmark = pytest.mark.threads


def micro_steps(model) -> list[int]:
    """By rank, since the last time."""
    return [stats.micro_steps for stats in model.close_run(model.open_run(), lambda: None)]


def prompts(batch: int = 1):
    """A latent, a timestep, and conditioning of two lengths."""
    x, timestep, short = mini.inputs(batch=batch, text=3)
    return x, timestep, (short, mini.inputs(batch=batch, text=7, seed=2)[2])


@pytest.mark.parametrize(
    ("batch", "first_replica", "expected"), [(1, 0, [1, 0]), (1, 1, [0, 1]), (1, 2, [1, 0]), (3, 1, [1, 1])]
)
def test_a_call_begins_on_its_home_replica(remote, mini_model, batch, first_replica, expected):
    model = remote(Degrees(batch=2))
    micro_steps(model)
    x, timestep, (tensors, _) = prompts(batch)
    output = model.predict(ModelCall(x, timestep, tensors, first_replica=first_replica), lambda: None)
    assert micro_steps(model) == expected
    assert torch.equal(output, model.predict(ModelCall(x, timestep, tensors), lambda: None))
    assert mini.relative(output, mini.reference(mini_model, x, timestep, tensors)) <= 1e-5


def test_a_call_made_meanwhile_is_under_way_before_the_first_is_waited_for(remote):
    model = remote(Degrees(batch=2))
    x, timestep, (short, long) = prompts()
    apart = [model.predict(ModelCall(x, timestep, tensors), lambda: None) for tensors in (short, long)]
    micro_steps(model)
    posted, outputs, post = [], [], model.post

    def second() -> None:
        assert len(posted) == 1
        outputs.append(model.predict(ModelCall(x, timestep, long, first_replica=1), lambda: None))

    def hold_back(call) -> None:
        """The first call reaches the ranks with the second one: whoever waited for it first would wait for ever."""
        posted.append(call)
        if len(posted) == 2:
            for held in posted:
                post(held)

    model.post = hold_back
    try:
        first = model.predict(ModelCall(x, timestep, short), lambda: None, on_posted=second)
    finally:
        del model.post
    assert torch.equal(first, apart[0])
    assert torch.equal(outputs[0], apart[1])
    assert micro_steps(model) == [1, 1]


def guided_in_bands(model, together: bool, warm_up: int, steps: int = 4, bands: int = 2) -> tuple[torch.Tensor, list[int]]:
    """Euler with guidance, two calls a step, in bands; and the ranks' micro-steps."""
    x, _, (short, long) = prompts()
    patching, sigmas = model.built.patching, linear_sigmas(steps)
    rows = cut_rows(tuple(x.shape), bands, patching)
    micro_steps(model)
    run = BandedRun(model, rows, tuple(x.shape), warm_up > 0)
    limit = exact_above(sigmas, warm_up)

    def sample(band: int) -> torch.Tensor:
        latent = patching.rows(x, rows[band])
        for sigma, following in itertools.pairwise(sigmas):
            found = {}

            def predict(index: int, on_posted, latent=latent, sigma=sigma, found=found) -> None:
                tensors, exact = (short, long)[index], float(sigma) > limit
                first_replica = index if together else 0
                found[index] = run.predict(
                    band,
                    ModelCall(latent, sigma.repeat(1), tensors, first_replica=first_replica),
                    exact,
                    on_posted=on_posted,
                )

            if together:
                predict(0, lambda predict=predict: predict(1, lambda: None))
            else:
                predict(0, lambda: None)
                predict(1, lambda: None)
            latent = latent + (following - sigma) * (found[0] + 3 * (found[1] - found[0]))
        return latent

    sampled = torch.cat(run_bands(run, sample, lambda: None, lambda: None), dim=patching.band_dim)
    return sampled, [stats.micro_steps for stats in model.close_run(run.run, lambda: None)]


@pytest.mark.parametrize("warm_up", [0, 1, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_bands_with_two_calls_a_step(remote, batch, warm_up):
    """Each conditioning's keys and values stay on one replica."""
    degrees = Degrees(pipe=2, batch=batch)
    expected, apart = guided_in_bands(remote(Degrees(pipe=2)), False, warm_up)
    found, together = guided_in_bands(remote(degrees), True, warm_up)
    assert torch.equal(found, expected)
    assert sum(together) == sum(apart)
    assert set(together) == {apart[0] // batch}
