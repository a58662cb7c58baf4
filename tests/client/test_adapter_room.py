"""A LoRA that has no room on a device: weights give way before it comes, and come back when it goes."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel_backend.client import adapter_room
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.residency import ALL, offload_of
from parallel_backend.rank.stage.lora import Adapters
from testing import mini
from testing.emulated_device import EmulatedDevice
from testing.models import on_ranks
from tests.conftest import Pools
from tests.rank.test_lora import diffs, lora

pytestmark = [pytest.mark.threads, pytest.mark.slow]

BLOCK = 2_374_912
"""Bytes of the largest block."""
ROOM = 2_000_000
"""Bytes that each device has beside the weights of its rank."""
RANK = 64
"""Of the LoRA, with 7.3 MB of factors: more than there is room for."""


def nobody() -> None:
    pass


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


def load(pools: Pools, path: Path, degrees: Degrees, offload: str = "auto") -> RemoteTransformer:
    return on_ranks(pools(degrees.world), mini.opened(path), degrees, "fp32", "sdpa", nobody, offload=offload_of(offload))


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=2), Degrees(ulysses=2), Degrees(tensor=2)], ids=str)
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

    def give(device: str, missing: int) -> int:
        asked.append(missing)
        return missing

    asked.clear()
    model._memory.make_room = give
    model.adapt("a LoRA", deltas, nobody)
    assert asked
    assert model.weight_bytes == [total]  # another program has given it


def test_where_weights_may_not_be_streamed_nothing_moves(devices, mini_file, overfull):
    model = load(devices(40_000_000), mini_file, Degrees(), "none")
    asked: list[int] = []
    model._memory.make_room = lambda device, missing: asked.append(missing) or 0
    model.adapt("a LoRA", lora(load_file(mini_file), rank=8 * RANK), nobody)
    assert len(asked) == 1  # which was in vain
    assert set(model.resident.limits) == {ALL}
    assert model.on_ranks
