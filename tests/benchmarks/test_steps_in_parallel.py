"""The simulation of steps in parallel makes the steps it says, on models whose outputs are known."""

import pytest
import torch

from benchmarks.fidelity.steps_in_parallel import SAMPLERS, sample, step_times
from parallel_backend.client.sampling import linear_sigmas

NOISE = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIGMAS = linear_sigmas(9).double()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("replicas", "forecast"), [(2, False), (4, False), (2, True)])
def test_steps_are_made_where_the_predictions_lead(sampler, replicas, forecast):
    """Outputs on a line in sigma are predicted right by a line, so all inputs are the exact run's, and wrong by reuse."""
    advance, asked = SAMPLERS[sampler], []

    def velocity(x, sigma):
        asked.append((float(sigma), x))
        return NOISE.roll(1) * (1 + sigma)

    exact = sample(velocity, NOISE, SIGMAS, advance)
    whole = dict(asked)
    asked.clear()
    given = velocity, NOISE, SIGMAS, advance, replicas, 2
    torch.testing.assert_close(sample(*given, degree=1, forecast=forecast), exact)
    assert len(asked) == (step_times(9, replicas, 2) if forecast else 9)
    for sigma, x in asked:
        torch.testing.assert_close(x, whole[sigma])
    asked.clear()
    sample(*given, degree=0, forecast=forecast)
    assert not all(torch.allclose(x, whole[sigma]) for sigma, x in asked)
