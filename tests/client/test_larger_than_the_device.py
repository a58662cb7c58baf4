"""Models that emulated devices do not hold are run, not refused, and give what they give on devices that do."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from safetensors.torch import load_file

from parallel_backend.client import adapter_room
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
from parallel_backend.rank.stage.lora import Adapters
from testing import mini
from testing.emulated_device import EmulatedDevice
from testing.models import nobody, on_ranks
from tests.rank.test_lora import diffs, lora
from tests.support.pools import Pools

pytestmark = [pytest.mark.threads, pytest.mark.slow]

BUDGET, RATE = 6_600_000, 1e9
"""Bytes of each rank's device, and bytes a second that come there. The model has 13 MB of weights."""


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
    found = lasting(calibrate(small_devices(2), mini.opened(mini_file), "fp32", nobody))
    assert [(device.memory, device.copies) for device in found.machine.devices] == [(BUDGET, RATE)] * 2
    workload = workload_of(mini.opened(mini_file), "fp32", "cpu", (1, 16, 16, 12), 1, 4, 8)
    planned = predict(CalibratedCosts(found, workload), Mode(Degrees(ulysses=2)))
    model = load(small_devices, mini_file, Degrees(ulysses=2))
    results(model)
    assert not planned.lacks
    assert 0 < planned.most_streamed <= model.resident.weights[0].streamed(model.resident.limits[0])


# A LoRA that has no room on a device: weights give way before it comes, and come back when it goes.

BLOCK = 2_374_912
"""Bytes of the largest block."""
ROOM = 2_000_000
"""Bytes that each device has beside the weights of its rank."""
RANK = 64
"""Of the LoRA, with 7.3 MB of factors: more than there is room for."""


@pytest.fixture
def devices(thread_pools) -> Iterator[Callable[[int], Pools]]:
    """`devices(nbytes)`: ranks with so much memory."""
    made: list[Pools] = []

    def make(nbytes: int) -> Pools:
        made.append(Pools(functools.partial(thread_pools.start, device=EmulatedDevice(nbytes, 1e9)), silence=300))
        return made[-1]

    yield make
    for pools in made:
        pools.close()


@pytest.fixture
def overfull(monkeypatch) -> list[int]:
    """Bytes of weights and additions on a device, each time that there were too many. `overfull[0]`: how many it holds."""
    put, found = Adapters._put, [1 << 60]

    def checked(adapters, part):
        put(adapters, part)
        if (held := adapters._store.device_bytes + adapters.nbytes) > found[0]:
            found.append(held)

    monkeypatch.setattr(Adapters, "_put", checked)
    monkeypatch.setattr(adapter_room, "AT_ONCE", 1)
    return found


def output(model: RemoteTransformer) -> torch.Tensor:
    model.begin_timeline()
    return model.predict(ModelCall(*mini.inputs(batch=1)), nobody)


@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(tensor=2)], ids=str)
def test_weights_give_way_to_a_lora_and_come_back(degrees, thread_pools, devices, mini_file, overfull):
    state = load_file(mini_file)
    deltas = [*lora(state, rank=RANK), *(delta for delta in diffs(state) if delta.up.ndim == 1)]
    roomy = thread_pools.mini(mini_file, degrees)
    largest = max(roomy.weight_bytes)
    plain = output(roomy)
    roomy.adapt("a LoRA", deltas, nobody)
    adapted = output(roomy)
    added = roomy.adapter_bytes
    roomy.adapt(None, (), nobody)

    budget = int(largest / 0.85) + ROOM  # weights take up to 0.85 of a device where no run is known
    assert max(map(sum, zip(roomy.weight_bytes, added, strict=True))) > budget
    model = load(devices(budget), mini_file, degrees)
    whole = model.weight_bytes
    assert set(model.resident.limits) == {ALL}
    overfull[0] = budget
    model.adapt("a LoRA", deltas, nobody)
    assert overfull == [budget]
    assert model.adapter_bytes == added
    assert min(model.resident.limits) < ALL
    assert torch.equal(output(model), adapted)
    model.adapt(None, (), nobody)
    assert torch.equal(output(model), plain)
    assert model.weight_bytes == whole
    assert set(model.resident.limits) == {ALL}


def test_no_more_gives_way_than_is_needed_and_others_first(devices, mini_file, overfull):
    deltas = lora(load_file(mini_file), rank=RANK)
    size = sum(4 * (delta.up.numel() + delta.down.numel()) for delta in deltas)
    model = load(devices(30_000_000), mini_file, Degrees())
    total = model.weight_bytes[0]
    model.adapt("a LoRA", deltas, nobody)
    assert model.weight_bytes == [total]  # there is room
    model.adapt(None, (), nobody)

    budget = int(total / 0.85) + ROOM
    model = load(devices(budget), mini_file, Degrees())
    asked: list[int] = []
    model._memory.make_room = lambda device, missing: asked.append(missing) or 0
    model.adapt("a LoRA", deltas, nobody)
    assert asked
    lacked = total + size - 0.95 * (budget - total) - total
    gone = total - model.resident.expected()[0]
    assert lacked <= gone < lacked + 2 * BLOCK
    model.adapt(None, (), nobody)
    output(model)

    asked.clear()
    model._memory.make_room = lambda device, missing: asked.append(missing) or missing
    model.adapt("a LoRA", deltas, nobody)
    assert asked
    assert model.weight_bytes == [total]  # another program has given it
