"""Several models on the same ranks: each computes as if it were alone, whatever the others do meanwhile."""

import functools

import pytest
import torch

from parallel_backend.checkpoints.reader import Reader
from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.registry import Registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from testing import mini
from testing.emulated_device import EmulatedDevice
from testing.models import nobody, whole_call

pytestmark = pytest.mark.threads


def test_a_run_that_was_given_up_is_over(remote):
    """What a LoRA has added stays during a run alone."""
    model = remote(Degrees(pipe=2))
    run = model.open_run()
    model.watch_memory(run, 2, False, nobody)
    assert model._memory.in_run
    model.discard_run(run)
    assert not model._memory.in_run


# What the registry keeps, on ranks.

SIZES = mini.CONFIG | {"double_blocks": 2, "single_blocks": 4}
LARGEST = 10_000_000
"""About as many bytes of weights as a rank has of one of these models under Ulysses; under others they are fewer."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three models of the same sizes."""
    folder = tmp_path_factory.mktemp("three")
    return [mini.save(mini.random_model(SIZES, seed=seed), folder / f"{seed}.safetensors") for seed in range(3)]


@pytest.fixture
def registries(thread_pools):
    """`registries(device)`: a registry whose ranks are threads, with this emulated device if one is given."""
    made: list[Registry] = []

    def make(emulated: EmulatedDevice | None = None) -> Registry:
        made.append(Registry())
        made[-1].threads = 1
        made[-1].start_of = lambda devices: functools.partial(thread_pools.start, device=emulated)
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def opened(monkeypatch):
    """Grows with each time that a rank, or the client, opens a file for its values."""
    found, begin = [], Reader.__init__

    def noted(reader: Reader, *arguments) -> None:
        found.append(reader)
        begin(reader, *arguments)

    monkeypatch.setattr(Reader, "__init__", noted)
    return found


def key_of(file, degrees: Degrees, devices=("cpu:0", "cpu:1")) -> Setup:
    return mini.setup(file, "fp32", devices, degrees, "sdpa", "even")


def sampled(registry: Registry, *keys: Setup, steps: int = 2) -> list[torch.Tensor]:
    """A sampling run of each model, one behind the other."""
    given, found = mini.inputs(SIZES), []
    for key in keys:
        registry.begin_run()
        found.append([registry.model(key, nobody).predict(ModelCall(*given), nobody) for _ in range(steps)][-1])
    return found


OVERLAPPING = {
    "within the other's": ((0, 1), Degrees(ulysses=2), (0, 1, 2, 3), Degrees(pipe=2, ulysses=2)),
    "in part": ((0, 1), Degrees(tensor=2), (1, 2), Degrees(ring=2)),
    "of displaced patches": ((2, 3), Degrees(patch=2, patch_mode="displaced"), (0, 1, 2, 3), Degrees(ring=2, tensor=2)),
}


@pytest.mark.parametrize(("few", "first", "many", "second"), OVERLAPPING.values(), ids=OVERLAPPING)
def test_models_on_devices_that_overlap_take_turns_without_new_ranks(registries, files, opened, few, first, many, second):
    """As on pools of their own, bit for bit; beside each other, too, and with one of them unloaded and loaded again."""
    places = [tuple(f"cpu:{rank}" for rank in ranks) for ranks in (few, many)]
    keys = [key_of(file, degrees, devices) for file, degrees, devices in zip(files, (first, second), places, strict=False)]
    expected = [sampled(registries(), key)[0] for key in keys]
    registry = registries()
    assert all(map(torch.equal, sampled(registry, *keys, keys[0]), (*expected, expected[0])))  # the pool grows once
    pool = registry.pool
    opened.clear()
    for _ in range(2):
        assert all(map(torch.equal, sampled(registry, *keys), expected))
    assert not opened
    assert registry.pool is pool and pool.error is None
    calls = [whole_call(registry.model(key, nobody), *mini.inputs(SIZES)) for key in (*keys, *keys)]
    for key, call in zip((*keys, *keys), calls, strict=True):  # none is waited for: their micro-steps mix
        registry.model(key, nobody).post(call)
    found = [call.future.result(timeout=60) for call in calls]
    assert all(map(torch.equal, found[:2], found[2:]))
    for key in keys:
        registry.unload(key)
        assert all(map(torch.equal, sampled(registry, *keys), expected))
    assert registry.pool is pool
    shown = registry.overview()[0]
    assert [len(model["weights"]) for model in shown["models"]] == [len(pool.devices)] * 2
    assert [sum(map(bool, model["weights"])) for model in shown["models"]] == [len(few), len(many)]


def test_what_is_added_to_an_idle_model_makes_way_for_another_one_and_comes_back(registries, files):
    """Or the other one would be streamed, or refused, for a LoRA that is not in use."""
    keys = [key_of(file, Degrees(ulysses=2)) for file in files[:2]]
    given, registry = mini.inputs(SIZES), registries(EmulatedDevice(115 * LARGEST // 100, 1e9))
    shapes = mini.opened(files[0]).original_shapes
    deltas = [Delta(key, torch.full(shape, 0.01)) for key, shape in list(shapes.items())[::5]]

    def of_first() -> torch.Tensor:
        registry.begin_run()
        model = registry.model(keys[0], nobody)
        model.adapt("additions", deltas, nobody)
        assert min(model.adapter_bytes) > LARGEST // 10
        return model.predict(ModelCall(*given), nobody)

    expected = of_first()
    (other,) = sampled(registry, keys[1])
    assert torch.equal(other, sampled(registries(), keys[1])[0])
    assert not any(registry.model(keys[0], nobody).adapter_bytes)
    second = registry.model(keys[1], nobody)
    held = zip(second.weight_bytes, second.resident.weights, strict=True)
    assert all(here >= weights.total for here, weights in held)
    assert torch.equal(of_first(), expected)
