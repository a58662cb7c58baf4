"""Weights on emulated devices: streamed under every split, given way and back, adapters of every kind, several models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Offload
from parallel_backend.wire import messages as m
from testing import mini
from testing.models import on_ranks, whole_call
from tests.campaigns.transport.cases import CONFIG, Files, nobody
from tests.support.cpu_and_gpu import Both

pytestmark = pytest.mark.threads

EVERYTHING = Offload(leave_free=1 << 50)
"""All blocks are streamed."""
SMALL = 64 << 10
"""Bytes of the last sends, of what is kept for a prompt, and by which an allocation is larger than its tensor, at most."""
SHARES = (0.5, 0.8, 1.0, 0.4)
DEEP = CONFIG | {"double_blocks": 3}
"""Three blocks for each of two stages, of which two can be in slots."""
GIVEN = mini.inputs(CONFIG, height=9, width=10, text=5)
PIPE, DISPLACED = Degrees(pipe=2), Degrees(patch=2, patch_mode="displaced")


def on_gpu(pool: Any) -> bool:
    return pool.devices[0].startswith("cuda")


def results(model: RemoteTransformer) -> list[torch.Tensor]:
    """A call, and a run in bands or patches."""
    noise, _, tensors = mini.inputs(CONFIG, batch=1, height=10, width=8, text=5)
    bands, steps = (1, 3) if model.degrees.displaced else (2, 2)
    sampled = sample_in_bands(model, noise, linear_sigmas(steps), Prompt(tensors, tensors, 1.0), bands, 1)[0]
    return [model.predict(ModelCall(*GIVEN), nobody), sampled]


@pytest.mark.parametrize("degrees", [PIPE, pytest.param(DISPLACED, marks=pytest.mark.slow)], ids=str)
def test_streamed_weights_with_several_shares_on_the_device(both: Both, files: Files, degrees: Degrees):
    """What is to be resident changes between runs: blocks come, go, and take turns in slots."""

    def run(load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
        if not on_gpu(pool(2)):
            return results(load(files.mini(DEEP), degrees)) * (1 + len(SHARES))
        model = load(files.mini(DEEP), degrees, offload=EVERYTHING)
        whole = [one.total for one in model.resident.weights]
        assert all(held < total for held, total in zip(model.weight_bytes, whole, strict=True))
        found = results(model)
        for share in SHARES:
            model.resident.tell([int(share * total) for total in whole])
            found += results(model)
        return found

    both.check(run)


def test_weights_give_way_and_come_back(both: Both, files: Files):
    """All of a device's, between runs and between a run's opening and its first call; then a part of one device's."""

    def run(load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
        ranks = pool(2)
        model = load(files.mini(), PIPE)

        def in_a_run(before: Callable[[], Any]) -> torch.Tensor:
            """A call whose keys go into the run's buffer, by other kernels than one without."""
            opened = model.open_run()
            model.watch_memory(opened, 2, False, nobody)
            call = whole_call(model, *GIVEN, opened)
            before()
            model.post(call)
            model.close_run(opened, nobody)
            return model.built.patching.unpack(call.future.result(60), tuple(GIVEN[0].shape))

        found = results(model)
        if not on_gpu(ranks):
            return [*found, *found, in_a_run(lambda: None), *found]
        held = model.weight_bytes
        for device in ranks.devices:
            assert model.give_way(device, 1 << 50, nobody) >= model.resident.weights[0].total // 2
        assert not any(model.weight_bytes)
        both.check_less_than(min(held) // 2)
        found += results(model)
        assert model.weight_bytes == held
        found.append(in_a_run(lambda: model.give_way(ranks.devices[0], 1 << 50, nobody)))
        model.give_way(ranks.devices[0], model.weight_bytes[0] // 2, nobody)
        return found + results(model)

    both.check(run)


def deltas(model: RemoteTransformer, every: int, rank: int | None) -> list[Delta]:
    """For every so manieth matrix: of low rank, or full where `rank` is None."""
    generator, made = torch.Generator().manual_seed(every), []
    shapes = {key: shape for key, shape in model.checkpoint.original_shapes.items() if len(shape) == 2}
    for key, (rows, columns) in list(shapes.items())[::every]:
        up = torch.randn(rows, rank or columns, generator=generator)
        made.append(Delta(key, up, torch.randn(rank, columns, generator=generator) if rank else None, 0.02))
    return made


@pytest.mark.parametrize("offload", [Offload(), EVERYTHING], ids=["resident", "streamed"])
def test_adapters(both: Both, files: Files, offload):
    """Of low rank, full, at another strength, and dropped."""

    def run(load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
        model = load(files.mini(), PIPE, **({"offload": offload} if on_gpu(pool(2)) else {}))
        found = [model.predict(ModelCall(*GIVEN), nobody)]
        for made in (deltas(model, 3, 2), deltas(model, 9, None), [*deltas(model, 4, 3), *deltas(model, 7, None)]):
            model.adapt(object(), made, nobody)
            found.append(model.predict(ModelCall(*GIVEN), nobody))
        model.adapt(None, (), nobody)
        return [*found, model.predict(ModelCall(*GIVEN), nobody)]

    found = both.check(run)
    assert torch.equal(found[0], found[-1])
    assert all(mini.relative(one, found[0]) > 1e-3 for one in found[1:-1])


def test_buffers_of_another_models_open_run_are_not_counted_as_a_models_own(both: Both, files: Files):
    """What a model holds is memory that it may use again."""

    def run(load: Callable[..., RemoteTransformer], pool: Callable[[int], Any]) -> list[torch.Tensor]:
        one, ranks = load(files.mini(), PIPE), pool(2)
        two = on_ranks(ranks, one.checkpoint, PIPE, "fp32", "sdpa", nobody, keep_others=True)
        opened = one.open_run()
        call = whole_call(one, *GIVEN, opened)
        one.post(call)
        found = [call.future.result(60)]
        if on_gpu(ranks):
            held = two._ranks.ask(m.ReadMemory(), m.DeviceMemoryReport).result(timeout=60)
            assert all(each.held_bytes < size + SMALL for each, size in zip(held, two.weight_bytes, strict=True))
        buffers = [each.buffer_bytes for each in one.close_run(opened, nobody)]
        assert min(buffers) > SMALL
        return found

    both.check(run)
