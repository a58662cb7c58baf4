"""Models that emulated devices do not hold are run, not refused, and give what they give on devices that do."""

import functools
from collections.abc import Iterator

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.residency import ALL, offload_of
from parallel_backend.planning.calibrated_costs import CalibratedCosts
from parallel_backend.planning.calibration import calibrate, lasting
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.prediction import predict
from parallel_backend.planning.workload import workload_of
from testing import mini
from testing.emulated_device import EmulatedDevice
from testing.models import on_ranks
from tests.conftest import Pools

pytestmark = [pytest.mark.threads, pytest.mark.slow]

BUDGET, RATE = 6_600_000, 1e9
"""Bytes of each rank's device, and bytes a second that come there. The model has 13 MB of weights."""


def nobody() -> None:
    pass


@pytest.fixture(scope="module")
def small_devices(thread_pools) -> Iterator[Pools]:
    pools = Pools(functools.partial(thread_pools.start, device=EmulatedDevice(BUDGET, RATE)), silence=300)
    yield pools
    pools.close()


def load(pools: Pools, path, degrees: Degrees, offload: str = "auto") -> RemoteTransformer:
    """Always anew: how it is placed goes by what is free."""
    pool = pools(degrees.world)
    pools.forget(degrees.world)
    return on_ranks(pool, mini.opened(path), degrees, "fp32", "sdpa", nobody, "even", offload=offload_of(offload))


def results(model: RemoteTransformer) -> list[torch.Tensor]:
    """A call, one for a larger picture, and that of before again; then a run in bands, where the mode has one."""
    found = []
    for height, width in ((16, 12), (48, 32), (16, 12)):
        model.begin_timeline()
        x, timestep, tensors = mini.inputs(batch=1, height=height, width=width)
        found.append(model.predict(ModelCall(x, timestep, tensors), nobody))
    if model.degrees.pipe > 1:
        model.begin_timeline()
        found.append(sample_in_bands(model, x, linear_sigmas(3), Prompt(tensors, {}, 1.0), 2, 1)[0])
    return found


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=2), Degrees(ulysses=2), Degrees(tensor=2)], ids=str)
def test_what_does_not_fit_is_streamed(degrees, small_devices, thread_pools, mini_file):
    expected = results(thread_pools.mini(mini_file, degrees))
    model = load(small_devices, mini_file, degrees)
    stage = 0  # of a pipeline the second one has less, and fits
    assert model.resident.limits[stage] < ALL
    assert 0 < model.weight_bytes[stage] <= BUDGET < model.resident.weights[stage].total
    for one, two in zip(results(model), expected, strict=True):
        assert torch.equal(one, two)
    assert max(model.weight_bytes) <= BUDGET
    assert sum(model.resident.host_bytes) >= model.resident.weights[stage].total - BUDGET


def test_a_merge_into_streamed_weights_counts_as_host_memory(small_devices, mini_file):
    """It gives a rank its own copy of weights, which the client has to know when other models ask for host memory."""
    model = load(small_devices, mini_file, Degrees(ulysses=2))
    results(model)
    before = sum(model.resident.host_bytes)
    weights = {key: shape for key, shape in model.checkpoint.original_shapes.items() if "blocks" in key and len(shape) == 2}
    model.adapt("merge", [Delta(key, torch.zeros(shape), instead=True) for key, shape in weights.items()], nobody)
    assert sum(model.resident.host_bytes) > before
    for rank, worker in model.pool.ranks.workers.items():
        assert worker.engines[model._ranks.number].stage.store.host_bytes == model.resident.host_bytes[rank]


def test_without_offload_it_is_refused_and_offload_is_what_would_help(small_devices, mini_file):
    with pytest.raises(ValueError, match=r"model_name: the weights of tiny\.safetensors take 12.7 MB on cpu") as refused:
        load(small_devices, mini_file, Degrees(), "none")
    assert "It would fit with offload auto" in str(refused.value)
    assert load(small_devices, mini_file, Degrees()).on_ranks


def test_a_calibration_knows_what_is_beside_the_devices(small_devices, mini_file):
    """Of the emulated devices the planner then streams as ranks do."""
    found = calibrate(small_devices(2), mini.opened(mini_file), "fp32", nobody)
    assert [(device.memory, device.copies) for device in lasting(found).machine.devices] == [(BUDGET, RATE)] * 2
    workload = workload_of(mini.opened(mini_file), "fp32", "cpu", (1, 16, 16, 12), 1, 4, 8)
    planned = predict(CalibratedCosts(found, workload), Mode(Degrees(ulysses=2)))
    model = load(small_devices, mini_file, Degrees(ulysses=2))
    results(model)
    assert not planned.lacks
    assert 0 < planned.most_streamed <= model.resident.weights[0].streamed(model.resident.limits[0])
