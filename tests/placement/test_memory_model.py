"""Memory is predicted before it is taken: K/V buffers to the byte, weights and activations about; what cannot fit is refused
with figures and a way out, before anything is sent."""

import gc
import itertools
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.memory_guard import MemoryGuard, request_of
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core import host_memory as host_memory_module
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.host_memory import LEFT_FREE, group_limits, host_memory, room_for_weights
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.families.base.patching import Patching, latents_of
from parallel_backend.placement.balance import even_stages, stages_by_size
from parallel_backend.placement.device_memory import DeviceMemory, device_memories
from parallel_backend.placement.memory_advice import Capacity, changes
from parallel_backend.placement.memory_check import MemoryCheck
from parallel_backend.placement.memory_model import KV_COPIES, Request, bytes_by_block, memory_of, step_tokens
from parallel_backend.placement.model_sizes import model_sizes
from parallel_backend.processes import local as launch
from parallel_backend.processes.failure_text import out_of_memory
from parallel_backend.processes.pool import Pool, RankError, again
from parallel_backend.rank import worker
from parallel_backend.rank.stage.store import device_copies
from parallel_backend.wire import messages as m
from testing import mini
from testing.cases import OF_EACH_FORM, all_cases
from testing.models import conditioning_of, on_ranks
from tests.campaigns.faults.census import settle
from tests.rank.test_module_cache import Runs
from tests.support import failing_rank
from tests.support.fake_cuda import AMPERE, fake_cuda

CASES = all_cases()
GB = 10**9
GIB = 1 << 30
BELOW, ABOVE = 0.4, 1.25
"""Measured activations over the estimate. Above 1 a run that is thought to fit may not; far below, one is warned about that
would: the two streams of Wan Animate 2 are computed one after the other. In models as narrow as these, latents and tables of
positions are a tenth or two of what blocks have; in real ones nothing."""


@pytest.fixture(scope="module", autouse=True)
def small_libraries():
    """What a GPU's libraries take would be nearly all that these models need: it is test_room.py's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COMMUNICATOR", "CONNECTION", "WORKSPACES"):
            patch.setattr(f"parallel_backend.placement.memory_model.{name}", 0)
        yield


def nobody() -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(case)`: its file."""
    files = {}

    def make(case):
        if case.name not in files:
            files[case.name] = case.save(case.model(), tmp_path_factory.mktemp(case.name) / "model.safetensors")
        return files[case.name]

    return make


# Keys and values, to the byte.


def banded(model, case, extrapolate=True, bands=2, steps=2):
    x, _, tensors = case.inputs()
    sigmas = linear_sigmas(steps) * case.timestep / 0.7
    return sample_in_bands(model, x, sigmas, Prompt(tensors, {}, 1.0), bands, 1, extrapolate=extrapolate)[1]


def predicted(model: RemoteTransformer, x, tensors, kept: int, bands: int = 1) -> list[int]:
    patching, shapes = model.family.patching, [tuple(latent.shape) for latent in latents_of(x)]
    conditioning = conditioning_of(model, patching.grid(shapes[0]), tensors, sound=patching.companion_tokens(shapes))
    request = request_of(conditioning, model.family, kept, bands)
    return [memory.buffers for memory in model._memory.memory_check.memory((request,))]


MODES = {
    Degrees(pipe=2): "bf16",
    Degrees(tensor=2): "fp32",
    Degrees(ulysses=2): "fp32",
    Degrees(patch=2, patch_mode="displaced"): "fp32",
}
"""With the dtype in which each is tried. In the default tier families of each form have their stages; what the other modes
hold is in test_buffers_of_every_mode."""
OF_FORMS = list({case.family: case for case in reversed(CASES) if case.family in OF_EACH_FORM}.values())


@pytest.mark.parametrize(
    ("case", "degrees"),
    [
        pytest.param(
            case,
            degrees,
            id=f"{case.name}-{degrees}",
            marks=() if degrees == Degrees(pipe=2) and case in OF_FORMS else pytest.mark.full,
        )
        for case in CASES
        for degrees in MODES
        if case.sampled
    ],
)
def test_buffers_of_every_family(case, degrees, pools, made):
    dtype = MODES[degrees]
    model = pools.load(made(case), degrees, dtype)
    stats = banded(model, case, bands=1 if degrees.displaced else 2)
    x, _, tensors = case.inputs()
    expected = predicted(model, x, tensors, KV_COPIES)
    assert [rank.buffer_bytes for rank in stats] == expected
    assert min(expected) > 0


EVERY_WAY = [
    Degrees(),
    Degrees(batch=2),
    Degrees(batch=4),
    Degrees(pipe=4),
    Degrees(pipe=2, ulysses=2),
    Degrees(pipe=2, tensor=2),
    Degrees(ring=2, tensor=2),
    Degrees(batch=2, pipe=2),
    Degrees(ulysses=3),
    Degrees(patch=2, ulysses=2, patch_mode="displaced"),
]
WITHOUT = (Degrees(), Degrees(pipe=2, ulysses=2))
"""Those that the default tier has without extrapolation too, which is one copy of the same buffers."""


@pytest.mark.parametrize(
    ("degrees", "extrapolate"),
    [
        *((degrees, True) for degrees in EVERY_WAY),
        *((degrees, False) for degrees in WITHOUT),
        *(pytest.param(degrees, False, marks=pytest.mark.full) for degrees in EVERY_WAY if degrees not in WITHOUT),
    ],
    ids=str,
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


def test_buffers_of_prompts_of_different_length(remote):
    """Each is a conditioning of its own, with buffers of its own."""
    model = remote(Degrees(batch=2))
    x, _, short = mini.inputs(batch=1, text=4)
    long = mini.inputs(batch=1, text=9)[2]
    run = BandedRun(model, (Span(0, x.shape[2]),), tuple(x.shape), True)
    requests = []
    for call, (first_replica, tensors) in itertools.product(range(2), enumerate((short, long))):
        run.predict(0, ModelCall(x, torch.tensor([1 - call / 10]), tensors, first_replica=first_replica), False)
    for first_replica, tensors in enumerate((short, long)):
        conditioning = conditioning_of(model, run.layout.grid, tensors, first_replica)
        requests.append(request_of(conditioning, model.family, KV_COPIES, 1))
    stats = model.close_run(run.run, nobody)
    found = model._memory.memory_check.memory(tuple(requests))
    assert [rank.buffer_bytes for rank in stats] == [memory.buffers for memory in found]
    assert found[0].buffers != found[1].buffers


# Weights and activations, about.


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=2), Degrees(tensor=2), Degrees(pipe=3)], ids=str)
def test_weights(remote, degrees):
    model = remote(degrees)
    expected = [memory.weights for memory in model._memory.memory_check.memory(())]
    assert model.weight_bytes == pytest.approx(expected, rel=0.03)
    if degrees.tensor == 1:
        assert model.weight_bytes == pytest.approx(expected, rel=2e-4)  # gaps between tensors


LATENTS = {4: (36, 32), 5: (3, 20, 20)}
"""By axes of the batch's latent: large enough that what does not grow with the tokens hardly counts."""


def peak_bytes(work) -> int:
    """Of what torch's allocator gave out on the CPU while `work` ran, at the highest."""
    gc.collect()  # else what other tests left could be freed meanwhile, and be taken off
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


ONE_OF_EACH = list({case.family: case for case in reversed(CASES)}.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.family in OF_EACH_FORM else pytest.mark.full)
        for case in ONE_OF_EACH
    ],
)
def test_activations(case, made, measured):
    larger = replace(case, latent=(case.latent[0], *LATENTS[len(case.latent) + 1]))
    runs = Runs(larger, made(case))
    checkpoint = open_checkpoint(made(case))
    sizes = model_sizes(checkpoint, "fp32", "cpu")
    grid, batch = runs.family.patching.grid(runs.shapes[0]), runs.shapes[0][0]
    text_tokens = runs.engine.conditionings[1].text_tokens
    timed = runs.timestep.ndim > 1
    request = Request(grid, runs.token_order.references, text_tokens, batch, timed=timed)
    spans = even_stages(len(sizes.block_bytes), 1)
    estimate = memory_of(sizes, Degrees(), spans, 0, (request,))
    with runs.run():
        whole = lambda number: list(runs.call(number, [runs.token_order.span]))  # noqa: E731
        whole(0), whole(1)  # the buffers are there, and what is made once
        peak = peak_bytes(lambda: whole(2))
    ratio = peak / estimate.activations
    measured(f"activations over the estimate, {case.name}, joint {sizes.joint}", ratio)
    assert BELOW < ratio < ABOVE
    assert peak > estimate.least > 0


class AskedFor(Exception):
    """A run would be held to what is free."""


def test_times_of_tokens_count(remote, mini_file, monkeypatch):
    model, asked = remote(Degrees()), []

    def fit(_guard, requests, _free):
        asked.extend(requests)
        raise AskedFor

    x, timestep, tensors = small()
    model.begin_timeline()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryGuard, "_fit", fit)
        for times in (timestep, timestep[:, None].expand(-1, 3)):
            with pytest.raises(AskedFor):
                model.predict(ModelCall(x, times, tensors), nobody)
    one, several = asked
    assert several == replace(one, timed=True)
    (little,), (much,) = (model._memory.memory_check.memory((request,)) for request in (one, several))
    assert much.activations > little.activations


# What is free.


def test_additions_of_controls_count(pools, made):
    """Each rank copies those for its blocks before the first of them. Blocks may share one."""
    case = next(case for case in CASES if case.name == "wan-animate-2")
    model = pools.load(made(case), Degrees(ulysses=2))
    x, timestep, tensors = case.inputs()
    tokens, hidden = torch.Size(case.row.patching.grid(tuple(x.shape))).numel(), case.row.sizes.hidden(case.config)
    blocks = [f"{name}.{index}" for name, count in case.row.blocks.counts(case.config).items() for index in range(count)]
    pair = [torch.ones(len(x), tokens, hidden) for _ in range(2)]
    model.begin_timeline()
    for residuals in ({}, {block: pair[number % 2] for number, block in enumerate(blocks)}):
        model.predict(ModelCall(x, timestep, tensors, residuals=residuals), nobody)
    one, several = sorted(model._memory._admitted, key=lambda request: request.added)
    assert several == replace(one, added=2)
    (little, *_), (much, *_) = (model._memory.memory_check.memory((request,)) for request in (one, several))
    assert much.activations - little.activations == 2 * len(x) * tokens * hidden * 4 / 2  # two tensors, over two ranks


def test_the_hosts_memory_is_that_of_the_system():
    free, total = host_memory()
    system = psutil.virtual_memory()
    assert total <= system.total
    assert 0 < free <= system.available + psutil.swap_memory().free + 0.2 * system.total


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(total, limits)`: 28 of `total` GB are available, and 32 GB of swap. `limits`: see group_limits."""

    def be(total: int, limits: list[tuple[int, int]]) -> None:
        sizes = {"MemTotal": total, "MemFree": 1, "MemAvailable": 28, "SwapTotal": 32, "SwapFree": 32}
        meminfo = tmp_path / "meminfo"
        meminfo.write_text("".join(f"{name}: {size << 20} kB\n" for name, size in sizes.items()))
        monkeypatch.setattr(host_memory_module, "MEMINFO", meminfo)
        monkeypatch.setattr(host_memory_module, "group_limits", lambda *_: limits)
        monkeypatch.setattr(sys, "platform", "linux")

    return be


@pytest.mark.parametrize(("total", "left"), [(32, 4.0), (64, 6.4)])
def test_page_locked_weights_leave_memory_to_the_rest_of_the_machine(machine, total, left):
    """And swap, into which they cannot go, is no room for them: it is for a CPU rank's."""
    machine(total, [])
    assert room_for_weights(torch.device("cuda:0")) == pytest.approx((28 - left) * GIB, abs=1)
    assert room_for_weights(torch.device("cpu")) == 60 * GIB - LEFT_FREE


def test_page_locked_weights_leave_memory_to_the_rest_of_a_container(machine):
    machine(64, [(10 * GIB, 16 * GIB), (14 * GIB, 20 * GIB)])
    assert room_for_weights(torch.device("cuda:0")) == 6 * GIB
    assert room_for_weights(torch.device("cpu")) == 10 * GIB - LEFT_FREE


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


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    group(tmp_path, memory__max="1000", memory__current="2000", memory__stat="inactive_file 0\n")
    assert list(group_limits("0::/docker/not/there\n", tmp_path)) == [(0, 1000)]


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


def test_parts_of_vaes_count_as_taken(monkeypatch):
    monkeypatch.setattr(device_copies, "measured_copy_rate", lambda device: 25e9)
    with fake_cuda(AMPERE) as cuda:
        cuda.hold(5 * GB)
        rank = worker.Worker(SimpleNamespace(rank=0, device="cuda:0"), None, None, None)
        rank.vae = {"decoder": SimpleNamespace(nbytes=2 * GB), "encoder": SimpleNamespace(nbytes=GB)}
        found = rank._read_memory()
    assert (found.free_bytes, found.held_bytes, found.vae_bytes) == (AMPERE.memory - 5 * GB, 2 * GB, 3 * GB)
    (memory,) = device_memories(("cuda:0",), [found])
    assert (memory.held, memory.vae) == (2 * GB, 3 * GB)


# What does not fit.


def gpus(*free: int | None, held: int = 0, total: int = 24 * GB) -> tuple[DeviceMemory, ...]:
    return tuple(DeviceMemory(f"cuda:{rank}", (rank,), size, held, total) for rank, size in enumerate(free))


def fitting(mini_file, degrees: Degrees, more: int = 1, dtype: str = "fp32") -> MemoryCheck:
    checkpoint = mini.opened(mini_file)
    spans = even_stages(8, degrees.pipe)
    devices = tuple(f"cuda:{rank}" for rank in range(degrees.world))
    return MemoryCheck(checkpoint, Setup(checkpoint.path, dtype, devices, degrees, "auto"), spans, more)


@pytest.mark.parametrize(("text", "references", "bands"), [(512, 0, 2), (512, 0, 4), (4096, 0, 4), (33, 64, 4), (77, 0, 8)])
def test_the_largest_band_is_that_of_the_cut(text, references, bands):
    """Which has fewer rows in the first band, for the text."""
    grid, patching = (64, 64), Patching()
    spans = cut_rows((1, 16, 128, 128), bands, patching, text, references)
    row = 64 + references / 64
    loads = [row * len(span) / 2 + text * (not span.start) for span in spans]
    request = Request(grid, references, text, 2)
    assert step_tokens(request.image, 64, text, 2, bands, bands)[1] == pytest.approx(2 * max(loads), abs=2)


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
    assert f"{(needed[1].activations + needed[1].staging) / 1e9:.1f} GB to compute" in text
    assert "more on cuda:1 (" in text
    assert "2.0 GB of 24.0 GB is free" in text
    assert "It would fit with " in text
    assert one.last == ((LARGE,), gpus(10 * GB, 2 * GB, held=3 * GB))


def test_advice_counts_on_the_memory_that_the_model_itself_holds(mini_file):
    """Little is free and much is held: the weights, which the changed run has there again."""
    request = Request((24, 24), 0, 8, 1, kept=2, bands=4)
    one = fitting(mini_file, Degrees())
    needed = one.memory((request,))[0]
    free = int(0.5 * needed.certain)
    assert needed.weights > free
    with pytest.raises(ValueError) as refused:
        one.check((request,), gpus(free, held=needed.weights))
    capacity = Capacity((0.95 * (free + needed.weights),), together=False)
    found = ways(mini_file, Degrees(), (request,), capacity, devices=1)
    assert any(way.startswith("a picture") for way in found)
    assert all(way in str(refused.value) for way in found)
    assert found != ways(mini_file, Degrees(), (request,), Capacity((0.95 * free,), together=False), devices=1)


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
    with pytest.raises(ValueError, match="use more devices, or larger ones"):
        one.check_weights(gpus(1000))


def ways(mini_file, degrees, requests, capacity, devices=4, dtype="fp32") -> list[str]:
    checkpoint = mini.opened(mini_file)
    sizes, spans = model_sizes(checkpoint, dtype, "cuda:0"), even_stages(8, degrees.pipe)
    setup = Setup(checkpoint.path, dtype, ("cuda:0",), degrees, "auto")
    return changes(checkpoint, setup, sizes, spans, requests, capacity, devices)


def total(mini_file, degrees, request) -> int:
    """Of the rank that needs most."""
    sizes = model_sizes(mini.opened(mini_file), "fp32", "cuda:0")
    spans = even_stages(8, degrees.pipe)
    return max(memory_of(sizes, degrees, spans, rank, (request,)).total for rank in range(degrees.world))


def test_what_is_named_fits_and_is_the_least_change(mini_file):
    need = total(mini_file, Degrees(pipe=2), LARGE)
    capacity = Capacity((0.7 * need,) * 2, together=False)
    found = ways(mini_file, Degrees(pipe=2), (LARGE,), capacity)
    assert any(way.startswith("pipefusion_degree") for way in found)
    picture = next(way for way in found if way.startswith("a picture"))
    share = float(picture.split()[2])
    smaller = replace(LARGE, grid=(round(512 * share) - 3,) * 2)
    assert total(mini_file, Degrees(pipe=2), smaller) <= 0.7 * need
    assert total(mini_file, Degrees(pipe=2), replace(LARGE, grid=(round(512 * share) + 6,) * 2)) > 0.7 * need
    assert "batch_size 1" not in found  # two entries may be one picture
    half = total(mini_file, Degrees(pipe=2), replace(LARGE, kept=1)) <= 0.7 * need
    assert ("extrapolate off" in found) == half


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


def test_video_and_large_batches_have_ways_of_their_own(mini_file):
    request = Request((8, 128, 128), 0, 512, 8, kept=2, bands=4)
    need = total(mini_file, Degrees(pipe=2), request)
    found = ways(mini_file, Degrees(pipe=2), (request,), Capacity((0.6 * need,) * 2, together=False))
    assert any(way.endswith("latent frames instead of 8") for way in found)
    assert "batch_size 1" in found


def test_more_ranks_do_not_help_where_memory_is_one(mini_file):
    need = total(mini_file, Degrees(), LARGE)
    found = ways(mini_file, Degrees(), (LARGE,), Capacity((0.8 * need,), together=True))
    assert not any("pipefusion" in way for way in found)
    assert any(way.startswith("a picture") for way in found)


# On ranks.


class Messages:
    """What a pool is asked and told."""

    def __init__(self, pool, monkeypatch):
        self.asked: list[type] = []
        send = pool.send

        def noting(rank, message, *rest):
            if rank == 0:
                self.asked.append(type(message))
            send(rank, message, *rest)

        monkeypatch.setattr(pool, "send", noting)


def small():
    x, timestep, tensors = mini.inputs()
    return x, timestep, tensors


@pytest.mark.parametrize("in_bands", [False, True])
def test_a_run_that_cannot_fit_is_refused_and_the_next_one_works(remote, mini_model, monkeypatch, in_bands):
    model = remote(Degrees(pipe=2))
    x, timestep, tensors = small()
    model.begin_timeline()
    sent = Messages(model.pool, monkeypatch).asked
    with monkeypatch.context() as patch:
        patch.setattr(
            MemoryGuard, "_device_memories", lambda self, poll: (DeviceMemory("cpu", (0, 1), 1000, 10 * GB, None),)
        )
        with pytest.raises(ValueError, match=r"latent_image: this run needs about .* MB more on this machine, for 2 ranks"):
            if in_bands:
                sample_in_bands(model, x, linear_sigmas(3), Prompt(tensors, {}, 1.0), 2, 1)
            else:
                model.predict(ModelCall(x, timestep, tensors), nobody)
    assert m.Step not in sent
    model.begin_timeline()
    assert (
        mini.relative(
            model.predict(ModelCall(x, timestep, tensors), nobody), mini.reference(mini_model, x, timestep, tensors)
        )
        < 1e-5
    )
    assert not model._memory._runs


def test_a_latent_beyond_all_memory_is_refused_before_anything_is_allocated(remote):
    model = remote(Degrees(pipe=2))
    side = 1 << 17
    x = torch.zeros(1).expand(1, 16, side, side)
    timestep, tensors = torch.full((1,), 0.7), mini.conditioning(batch=1, height=side, width=side)
    before = psutil.Process().memory_info().rss
    with pytest.raises(ValueError, match=r"latent_image: this run needs about .* GB more on this machine") as refused:
        model.predict(ModelCall(x, timestep, tensors), nobody)
    assert "times as wide and high" in str(refused.value)
    assert psutil.Process().memory_info().rss - before < 0.2 * GB
    assert model.pool.error is None


def test_weights_that_do_not_fit_are_refused_before_they_are_sent(pools, mini_file, monkeypatch):
    pool = pools(2)
    pools.forget(2)
    monkeypatch.setattr(MemoryGuard, "_device_memories", lambda self, poll: (DeviceMemory("cpu", (0, 1), 1000, 1000, None),))
    sent = Messages(pool, monkeypatch).asked
    with pytest.raises(ValueError, match=r"model_name: the weights of tiny\.safetensors take"):
        on_ranks(pool, mini.opened(mini_file), Degrees(pipe=2), "fp32", "sdpa", nobody, "even")
    assert m.Load not in sent


def test_the_ranks_are_asked_once_for_a_run(remote, monkeypatch):
    model = remote(Degrees(pipe=2))
    x, timestep, tensors = small()
    longer = tensors | {"context": tensors["context"].repeat(1, 2, 1)}
    asked = Messages(model.pool, monkeypatch).asked
    count = lambda: asked.count(m.ReadMemory)  # noqa: E731
    model.begin_timeline()
    for given_ in (tensors, longer, tensors):
        model.predict(ModelCall(x, timestep, given_), nobody)
    assert count() == 1
    model.begin_timeline()
    model.predict(ModelCall(x, timestep, tensors), nobody)
    assert count() == 2
    sample_in_bands(model, x, linear_sigmas(4), Prompt(tensors, longer, 1.0), 2, 1)
    assert count() == 3


def test_what_ranks_say_of_their_memory(remote):
    model = remote(Degrees(pipe=2))
    answers = model._ranks.ask(m.ReadMemory(), m.DeviceMemoryReport).result(timeout=60)
    assert [answer.held_bytes for answer in answers] == model.weight_bytes
    assert len({answer.place for answer in answers}) == 1
    assert {answer.cached_bytes for answer in answers} == {0}


# Out of memory all the same.


@pytest.mark.parametrize(
    "text, memory",
    [
        ("rank 0 failed in micro-step 3: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("rank 1 (cpu) was killed by signal 9. If", True),
        ("MemoryError: ", True),
        ("rank 1 (cpu) was killed by signal 15.", False),
        ("RuntimeError: shape '[2]' is invalid", False),
    ],
)
def test_what_counts_as_out_of_memory(text, memory):
    assert out_of_memory(text) == memory


def still_there(references: list[weakref.ref]) -> list[str]:
    gc.collect()
    return [str(reference) for reference in references if reference() is not None]


@pytest.mark.parametrize("in_bands", [False, True])
@pytest.mark.processes
def test_out_of_memory_says_what_would_fit_and_leaves_nothing_behind(mini_file, monkeypatch, in_bands):
    monkeypatch.setattr(launch, "rank_entry", lambda: failing_rank.out_of_memory)
    pool = Pool(("cpu", "cpu"))
    try:
        model = on_ranks(pool, mini.opened(mini_file), Degrees(pipe=2), "fp32", "sdpa", nobody)
        x, timestep, tensors = small()
        calls = []
        post = model.post
        monkeypatch.setattr(model, "post", lambda call: (calls.append(weakref.ref(call)), post(call)))
        kept = [weakref.ref(x), *(weakref.ref(tensor) for tensor in tensors.values())]
        try:
            if in_bands:
                sample_in_bands(model, x, linear_sigmas(5), Prompt(tensors, {}, 1.0), 2, 1)
            else:
                for _ in range(10):
                    model.predict(ModelCall(x, timestep, tensors), nobody)
        except RankError as error:
            text = str(error)
        assert text.startswith("Parallel DiT: rank 1 (cpu) failed in micro-step ")
        assert "OutOfMemoryError" in text.splitlines()[0]
        assert text.splitlines()[1].startswith("The run was expected to take: cpu ")
        assert "of weights" in text
        assert "It would fit with " in text
        for pid in pool.pids:
            assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        del x, tensors
        assert calls
        assert settle(lambda: still_there(calls + kept), 5.0) == []  # a thread may just be on its way out
        assert not model._posting._conditionings
        with pytest.raises(RankError, match="The run was expected to take"):  # the model stays unusable, and says why
            model.open_run()
    finally:
        pool.close()


def test_an_error_that_is_raised_again_keeps_nobody_alive():
    """The control of the test above: the very same error would keep what it was raised through."""

    class Held:
        pass

    def raised(error) -> weakref.ref:
        held = Held()
        try:
            raise error
        except RuntimeError:
            return weakref.ref(held)

    kept = RankError("text")
    same, other = raised(kept), raised(again(kept))
    gc.collect()
    assert same() is not None
    assert other() is None
    assert str(again(kept)) == "text"
