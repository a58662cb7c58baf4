"""How often a model call from a busy device stops the host. What comes from bands is on the host, and stops it nowhere."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from parallel_backend.client.call import ModelCall, same_values
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows
from parallel_backend.core.degrees import Degrees
from parallel_backend.families.own_class.call_arguments import STRUCTURE
from testing import mini
from tests.support.emulated_gpu import emulated
from tests.support.emulated_gpu.machine import Machine
from tests.support.fake_cuda import HOPPER

pytestmark = pytest.mark.threads
DEVICE = torch.device("cuda:0")


@pytest.fixture
def gpus(pools):
    """ComfyUI's device. The ranks are on the CPU: `emulated` waits at its end for those that start within it."""
    pools(2)
    with emulated(HOPPER) as machine:
        yield machine


def nothing() -> None:
    """A Poll that never gives up."""


def band_call(run: BandedRun, band: int, *call) -> Future:
    """The call of a band, on a thread of its own."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(run.predict, band, ModelCall(*call), exact=False)
    executor.shutdown(wait=False)
    return future


def on_device(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor if name == STRUCTURE else tensor.to(DEVICE) for name, tensor in tensors.items()}


def test_a_whole_call_stops_for_latent_timestep_and_a_comparison(remote, gpus: Machine):
    model = remote(Degrees(ulysses=2))
    x, timestep, tensors = mini.inputs()
    expected = model.predict(ModelCall(x, timestep, tensors), nothing)
    given = x.to(DEVICE), timestep.to(DEVICE)
    model.predict(ModelCall(*given, on_device(tensors)), nothing)  # the first sends the conditioning
    again = on_device(tensors)
    gpus.record.stops.clear()
    output = model.predict(ModelCall(*given, again), nothing)
    stops = list(gpus.record.stops)
    assert len(stops) == 3, stops
    assert sum("call.py" in stop for stop in stops) == 1, stops
    assert output.device == DEVICE
    assert torch.equal(output.cpu(), expected)


def test_a_bands_call_with_the_tensors_of_the_last_one_looks_at_no_value(remote, monkeypatch):
    """Bands are on the host; what their calls have in common is known without a look at it."""
    model = remote(Degrees(pipe=2))
    x, _, tensors = mini.inputs()
    rows = cut_rows(tuple(x.shape), 2, model.family.patching)
    compared = []

    def noting(pairs):
        compared.append([(a, b) for a, b in pairs])
        return same_values(pairs)

    monkeypatch.setattr("parallel_backend.client.call.same_values", noting)
    run = BandedRun(model, rows, tuple(x.shape), warm_up=False)

    def step(at: float) -> list[torch.Tensor]:
        threads = [
            band_call(run, band, x[:, :, span.slice], torch.full((2,), at), tensors) for band, span in enumerate(rows)
        ]
        return [thread.result(timeout=60) for thread in threads]

    step(0.9)
    compared.clear()
    assert all(output.isfinite().all() for output in step(0.5))
    assert len(compared) > 0
    assert not any(compared)
    model.discard_run(run.run)


def test_what_was_written_over_is_compared_again(remote, mini_model):
    """Also where the tensors are the same: test_requests.py has the writes of a host that reuses its buffers."""
    model = remote(Degrees(pipe=2))
    x, timestep, tensors = mini.inputs()
    with torch.inference_mode():
        kept_in_inference = {name: tensor.clone() for name, tensor in tensors.items()}
    for given in (tensors, kept_in_inference):
        model.predict(ModelCall(x, timestep, given), nothing)
        with torch.inference_mode():
            given["context"].mul_(-1.0)
        output = model.predict(ModelCall(x, timestep, given), nothing)
        assert mini.relative(output, mini.reference(mini_model, x, timestep, given)) <= 1e-5


@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
def test_values_are_compared_with_one_stop_for_all(where, gpus: Machine):
    ones = [torch.full((size,), 1.0).to(where) for size in (2, 3, 4)]
    others = [tensor.clone() for tensor in ones]
    gpus.record.stops.clear()
    assert same_values(list(zip(ones, others, strict=True)))
    assert len(gpus.record.stops) == (where != "cpu")
    others[1][0] = 2.0
    assert not same_values(list(zip(ones, others, strict=True)))
    assert not same_values([(ones[0], ones[1])])
    assert not same_values([(ones[0], ones[0].double())])
    assert not same_values([(torch.ones(2), torch.ones(2).to(DEVICE))])
