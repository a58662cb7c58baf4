"""Memory is predicted before it is taken: K/V buffers to the byte, weights and activations about; what cannot fit is refused
with figures and a way out, before anything is sent."""

import gc
import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.client.memory_guard import request_of
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core import host_memory as host_memory_module
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.host_memory import LEFT_FREE, group_limits, room_for_weights
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.calls.patching import latents_of
from parallel_backend.placement.balance import even_stages, stages_by_size
from parallel_backend.placement.device_memory import DeviceMemory, device_memories
from parallel_backend.placement.memory_advice import Capacity, changes
from parallel_backend.placement.memory_check import MemoryCheck
from parallel_backend.placement.memory_model import Request, bytes_by_block, memory_of
from parallel_backend.placement.model_sizes import model_sizes
from parallel_backend.wire import messages as m
from testing import mini
from testing.models import conditioning_of
from tests.support.one_rank import OneRank

pytestmark = pytest.mark.threads

GB = 10**9
GIB = 1 << 30
BELOW, ABOVE = 0.4, 1.25
"""Measured activations over the estimate. Above 1 a run that is thought to fit may not; far below, one is warned about that
would."""


# Keys and values, to the byte.


def predicted(model: RemoteTransformer, x, tensors, kept: int, bands: int = 1) -> list[int]:
    patching, shapes = model.built.patching, [tuple(latent.shape) for latent in latents_of(x)]
    conditioning = conditioning_of(model, patching.grid(shapes[0]), tensors, sound=patching.companion_tokens(shapes))
    request = request_of(conditioning, model.built, kept, bands)
    return [memory.buffers for memory in model._memory.memory_check.memory((request,))]


EVERY_WAY = [
    Degrees(),
    Degrees(batch=2),
    Degrees(pipe=2, ulysses=2),
    Degrees(pipe=2, tensor=2),
    Degrees(ring=2, tensor=2),
    Degrees(batch=2, pipe=2),
    Degrees(ulysses=3),
    Degrees(patch=2, ulysses=2, patch_mode="displaced"),
]


@pytest.mark.parametrize(
    ("degrees", "extrapolate"), [(Degrees(), False), *((degrees, True) for degrees in EVERY_WAY)], ids=str
)
def test_buffers_of_every_mode(remote, degrees, extrapolate):
    """Uneven shares of heads and entries too, and one run after another."""
    model = remote(degrees)
    for size in ({"batch": 3, "height": 22, "width": 12, "text": 5}, {"batch": 1, "height": 16, "width": 12, "text": 9}):
        x, _, tensors = mini.inputs(**size)
        bands = 1 if degrees.displaced else 3
        prompt = Prompt(tensors, {}, 1.0)
        stats = sample_in_bands(model, x, linear_sigmas(3), prompt, bands, 1, extrapolate=extrapolate)[1]
        assert [rank.buffer_bytes for rank in stats] == predicted(model, x, tensors, 1 + extrapolate)
        longer = tensors | {"context": torch.cat((tensors["context"], tensors["context"][:, :1]), dim=1)}
        assert predicted(model, x, longer, 1 + extrapolate) != predicted(model, x, tensors, 1 + extrapolate)  # the control


def peak_bytes(work) -> int:
    """Of what torch's allocator gave out on the CPU while `work` ran, at the highest."""
    gc.collect()  # else what other tests left could be freed meanwhile, and be taken off
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


def test_activations(mini_file):
    """Of a picture so large that what does not grow with the tokens hardly counts."""
    x, timestep, tensors = mini.inputs(height=72, width=64)
    rank = OneRank(mini_file)
    rank.put(x, tensors)
    sizes = model_sizes(rank.checkpoint, "fp32", "cpu")
    request = Request(rank.built.patching.grid(tuple(x.shape)), 0, rank.built.words(tensors), len(x))
    estimate = memory_of(sizes, Degrees(), even_stages(len(sizes.block_bytes), 1), 0, (request,))
    for _ in range(2):  # what is made once
        rank.step(x, timestep)
    peak = peak_bytes(lambda: rank.step(x, timestep))
    ratio = peak / estimate.activations
    assert BELOW < ratio < ABOVE
    assert peak > estimate.least > 0


# What is free.


@pytest.fixture
def machine(monkeypatch):
    """`machine(total, limits)`: 28 of `total` GB are available, and 32 GB of swap. `limits`: see group_limits."""

    def be(total: int, limits: list[tuple[int, int]]) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total * GIB, available=28 * GIB))
        monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=32 * GIB))
        monkeypatch.setattr(host_memory_module, "group_limits", lambda *_: limits)
        monkeypatch.setattr(sys, "platform", "linux")

    return be


@pytest.mark.parametrize(("total", "left"), [(32, 4.0), (64, 6.4)])
def test_page_locked_weights_leave_memory_to_the_rest_of_the_machine(machine, total, left):
    """And swap, into which they cannot go, is no room for them: it is for a CPU rank's."""
    machine(total, [])
    assert room_for_weights(torch.device("cuda:0")) == pytest.approx((28 - left) * GIB, abs=1)
    assert room_for_weights(torch.device("cpu")) == 60 * GIB - LEFT_FREE


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_the_smallest_limit_of_the_groups_above_counts(tmp_path):
    own = "0::/outer/inner\n"
    assert list(group_limits(own, tmp_path)) == []
    stat = "anon 100\ninactive_file 300\nactive_file 5\n"
    group(tmp_path / "outer", memory__max="5000\n", memory__current="4000\n", memory__stat=stat)
    group(tmp_path / "outer" / "inner", memory__max="max\n", memory__current="4000\n", memory__stat=stat)
    assert list(group_limits(own, tmp_path)) == [(1300, 5000)]
    group(tmp_path / "outer" / "inner", memory__max="4100")
    assert min(group_limits(own, tmp_path)) == (400, 4100)


def test_groups_of_the_first_version(tmp_path):
    files = {"memory.usage_in_bytes": "700", "memory.stat": "total_inactive_file 100\n"}
    group(tmp_path / "memory" / "a", **files, **{"memory.limit_in_bytes": "1000"})
    group(tmp_path / "memory", **files, **{"memory.limit_in_bytes": str(2**63 - 4096)})
    assert list(group_limits("12:cpuset:/x\n5:memory:/a\n0::/b\n", tmp_path)) == [(400, 1000)]


def test_ranks_of_one_place_share_it():
    answers = [
        m.DeviceMemoryReport(0, "a", 10 * GB, GB, 2 * GB, 24 * GB),
        m.DeviceMemoryReport(1, "b", 5 * GB, GB, 0, 8 * GB),
        m.DeviceMemoryReport(2, "a", 9 * GB, 3 * GB, GB, 24 * GB),
        m.DeviceMemoryReport(3, "c", None, 0, 0, None),
    ]
    devices = ("cuda:0", "cuda:1", "cuda:0", "cpu")
    assert device_memories(devices, answers) == (
        DeviceMemory("cuda:0", (0, 2), 12 * GB, 4 * GB, 24 * GB),
        DeviceMemory("cuda:1", (1,), 5 * GB, GB, 8 * GB),
        DeviceMemory("cpu", (3,), None, 0, None),
    )


# What does not fit.


def gpus(*free: int | None, held: int = 0, total: int = 24 * GB) -> tuple[DeviceMemory, ...]:
    return tuple(DeviceMemory(f"cuda:{rank}", (rank,), size, held, total) for rank, size in enumerate(free))


def fitting(mini_file, degrees: Degrees, more: int = 1, dtype: str = "fp32") -> MemoryCheck:
    checkpoint = mini.opened(mini_file)
    spans = even_stages(8, degrees.pipe)
    devices = tuple(f"cuda:{rank}" for rank in range(degrees.world))
    return MemoryCheck(
        checkpoint, Setup(checkpoint.path, dtype, devices, degrees, "auto", own_class=checkpoint.built.own), spans, more
    )


LARGE = Request((512, 512), 0, 512, 2, kept=2, bands=8)


def test_the_refusal_has_the_figures_of_the_device_that_lacks_memory(mini_file):
    one = fitting(mini_file, Degrees(pipe=2))
    needed = one.memory((LARGE,))
    one.check((LARGE,), gpus(10 * GB, 10 * GB))
    with pytest.raises(ValueError) as refused:
        one.check((LARGE,), gpus(10 * GB, 2 * GB, held=3 * GB))
    text = str(refused.value)
    assert text.startswith("latent_image: this run needs about ")
    assert f"{needed[1].buffers / 1e9:.1f} GB for keys and values" in text
    assert f"{needed[1].activations / 1e9:.1f} GB to compute" in text
    assert "more on cuda:1 (" in text
    assert "2.0 GB of 24.0 GB is free" in text
    assert "It would fit with " in text
    assert one.last == ((LARGE,), gpus(10 * GB, 2 * GB, held=3 * GB))


def test_an_estimate_only_warns_and_only_once(mini_file, caplog):
    one = fitting(mini_file, Degrees())
    needed = one.memory((LARGE,))[0]
    between = (needed.certain + needed.total - needed.weights) // 2
    for _ in range(3):
        one.check((LARGE,), gpus(between))
    assert len(caplog.records) == 1
    assert "this run needs about" in caplog.text
    one.check((LARGE,), gpus(None))  # not known: not checked
    one.check((LARGE,), gpus(2 * needed.total))
    assert len(caplog.records) == 1


def test_ranks_of_one_machine_need_it_together(mini_file):
    two = fitting(mini_file, Degrees(pipe=2))
    needed = [memory.certain for memory in two.memory((LARGE,))]
    memory = DeviceMemory("cpu", (0, 1), sum(needed) + 1, 0, None)
    two.check((LARGE,), (memory,))
    with pytest.raises(ValueError, match="more on this machine, for 2 ranks"):
        two.check((LARGE,), (replace(memory, free=sum(needed) - 1),))


def test_weights_are_refused_before_loading(mini_file):
    one = fitting(mini_file, Degrees(), more=2)
    size = one.memory(())[0].weights
    one.check_weights(gpus(size))
    one.check_weights(gpus(size // 2, held=size - size // 2))  # what the present model has is given back
    with pytest.raises(ValueError, match=r"model_name: the weights of tiny\.safetensors take .* on cuda:0") as refused:
        one.check_weights(gpus(int(0.85 * size)))
    assert "pipefusion_degree 2" in str(refused.value)
    assert "weight_dtype fp8_e4m3fn" in str(refused.value)
    with pytest.raises(ValueError, match="Use more devices, or larger ones"):
        one.check_weights(gpus(1000))


def ways(mini_file, degrees, requests, capacity, devices=4, dtype="fp32") -> list[str]:
    checkpoint = mini.opened(mini_file)
    sizes, spans = model_sizes(checkpoint, dtype, "cuda:0"), even_stages(8, degrees.pipe)
    setup = Setup(checkpoint.path, dtype, ("cuda:0",), degrees, "auto", own_class=checkpoint.built.own)
    return changes(checkpoint, setup, sizes, spans, requests, capacity, devices)


def total(mini_file, degrees, request) -> int:
    """Of the rank that needs most."""
    sizes = model_sizes(mini.opened(mini_file), "fp32", "cuda:0")
    spans = even_stages(8, degrees.pipe)
    return max(memory_of(sizes, degrees, spans, rank, (request,)).total for rank in range(degrees.world))


@pytest.mark.slow
@given(st.integers(1, 3), st.floats(0.05, 1.2), st.integers(1, 6), st.integers(0, 2))
def test_degrees_that_are_named_do_fit(mini_file, pipe, share, entries, kept):
    request, now = replace(LARGE, entries=entries, kept=kept), Degrees(pipe=pipe)
    limit = share * total(mini_file, now, request)
    found = ways(mini_file, now, (request,), Capacity((limit,) * pipe, together=False))
    widgets = {"pipefusion_degree": "pipe", "ulysses_degree": "ulysses", "tensor_parallel_degree": "tensor"}
    widgets |= {"split_batch_degree": "batch", "ring_degree": "ring"}
    for way in found:
        parts = [part.split() for part in way.split(" x ")]
        if all(part[0] in widgets for part in parts):
            degrees = Degrees(**{widgets[name]: int(count) for name, count in parts})
            sizes = model_sizes(mini.opened(mini_file), "fp32", "cuda:0")
            spans = stages_by_size(bytes_by_block(sizes, degrees, (request,)), degrees.pipe)
            needs = [memory_of(sizes, degrees, spans, rank, (request,)) for rank in range(degrees.world)]
            assert max(need.total for need in needs) <= limit
