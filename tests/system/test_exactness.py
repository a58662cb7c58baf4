"""Every product of exact modes equals one process, and the approximate mode depends on its schedule alone.

The tiny model is of the mini class, which ranks run as they run ComfyUI's.
"""

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from testing import mini

pytestmark = pytest.mark.threads

TOLERANCE = 1e-5

PRODUCTS = [
    Degrees(*sizes, patch_mode="displaced")
    for world in (1, 2, 4, 8)
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES))
    if math.prod(sizes) == world and 1 in (sizes[AXES.index("pipe")], sizes[AXES.index("patch")])
]
UNEVEN = [Degrees(ulysses=3), Degrees(ring=3), Degrees(ulysses=2, ring=3), Degrees(tensor=3), Degrees(tensor=3, ulysses=2)]
"""8 heads and the token counts below divide by none of these."""
CALLS = {
    "batch 3, splits unevenly": {"batch": 3},
    "odd sizes": {"batch": 2, "height": 15, "width": 11},
    "fewer entries and text tokens than ranks": {"batch": 1, "height": 4, "width": 10, "text": 3},
}


def name(degrees: Degrees) -> str:
    return "-".join(f"{axis}{size}" for axis, size in zip(AXES, degrees.sizes, strict=True) if size > 1) or "one"


@pytest.fixture(scope="module")
def exact_call(mini_model):
    """Case -> (inputs, one process's output)."""

    @functools.cache
    def make(case: str):
        given = mini.inputs(**CALLS[case])
        return given, mini.reference(mini_model, *given)

    return make


@pytest.fixture(scope="module")
def exact_run(mini_model):
    """(steps, height, width, cfg) -> (noise, sigmas, prompt, one process's sample)."""

    @functools.cache
    def make(steps: int = 3, height: int = 16, width: int = 12, cfg: float = 1.0):
        noise, _, positive = mini.inputs(height=height, width=width)
        negative = mini.inputs(height=height, width=width, seed=2)[2]
        prompt, sigmas = Prompt(positive, negative, cfg), linear_sigmas(steps)
        with torch.inference_mode():
            sample = euler(functools.partial(mini.reference, mini_model), noise, sigmas, prompt)
        return noise, sigmas, prompt, sample

    return make


@pytest.fixture
def processes(process_pools, mini_file) -> Callable[[Degrees], RemoteTransformer]:
    """`remote` on ranks in processes: for whole runs, which threads of one process take too long for."""
    return functools.partial(process_pools.mini, mini_file)


IN_PROCESSES = [d for d in PRODUCTS if sum(size > 1 for size in d.sizes) <= 2 and max(d.sizes) == 2] + [
    Degrees(batch=2, pipe=2, ulysses=2),
    Degrees(pipe=2, ring=2, tensor=2),
    Degrees(patch=2, ulysses=2, tensor=2, patch_mode="displaced"),
]
"""Every axis, every pair of axes, and some products of three: what they need of Gloo and of each other's processes."""


def tier(degrees: Degrees) -> list[pytest.MarkDecorator]:
    """The default tier does not repeat on threads what it has in processes. Eight ranks are in the full tier."""
    elsewhere = degrees.world == 8 or (degrees.world > 1 and degrees in IN_PROCESSES)
    return [pytest.mark.slow] * (degrees.world > 4) + [pytest.mark.full] * elsewhere


@pytest.mark.parametrize("degrees", [pytest.param(each, marks=tier(each), id=name(each)) for each in PRODUCTS + UNEVEN])
def test_one_call_equals_one_process(remote, exact_call, degrees):
    given, expected = exact_call("odd sizes")
    assert mini.relative(remote(degrees).predict(ModelCall(*given), lambda: None), expected) <= TOLERANCE


@pytest.mark.parametrize("degrees", IN_PROCESSES, ids=name)
def test_processes_equal_one_process(processes, exact_call, exact_run, degrees):
    given, expected = exact_call("odd sizes")
    model = processes(degrees)
    noise, sigmas, prompt, sampled = exact_run(height=15, width=11)
    sample, stats = sample_in_bands(model, noise, sigmas, prompt, 1 if degrees.displaced else 3, warm_up=3)
    error = max(mini.relative(model.predict(ModelCall(*given), lambda: None), expected), mini.relative(sample, sampled))
    assert error <= TOLERANCE
    assert len(stats) == degrees.world


@pytest.mark.parametrize("case", [case for case in CALLS if case != "odd sizes"])
@pytest.mark.parametrize("degrees", [d for d in PRODUCTS if d.world <= 2] + UNEVEN, ids=name)
def test_other_calls_equal_one_process(remote, exact_call, degrees, case):
    given, expected = exact_call(case)
    output = remote(degrees).predict(ModelCall(*given), lambda: None)
    assert output.shape == expected.shape
    assert mini.relative(output, expected) <= TOLERANCE


@pytest.mark.parametrize("degrees", [Degrees(batch=2, pipe=2), Degrees(pipe=2, ulysses=2)], ids=name)
def test_cfg_equals_one_process(remote, exact_run, degrees):
    noise, sigmas, prompt, expected = exact_run(cfg=3.0)
    sample, _ = sample_in_bands(remote(degrees), noise, sigmas, prompt, 3, warm_up=3)
    assert mini.relative(sample, expected) <= TOLERANCE


BANDED = [Degrees(), Degrees(pipe=2), Degrees(ulysses=2), Degrees(pipe=2, ring=2), Degrees(batch=2), Degrees(tensor=2)]


@pytest.mark.parametrize(("warm_up", "every"), [(1, BANDED), (0, BANDED[:3])], ids=["1", "0"])
def test_bands_with_old_keys_depend_on_the_schedule_alone(processes, exact_run, warm_up, every):
    noise, sigmas, prompt, exact = exact_run(steps=4)
    samples = {}
    for degrees in every:
        model = processes(degrees)
        first, _ = sample_in_bands(model, noise, sigmas, prompt, 4, warm_up)
        again, _ = sample_in_bands(model, noise, sigmas, prompt, 4, warm_up)
        assert torch.equal(first, again), name(degrees)
        samples[name(degrees)] = first
    alone = samples[name(Degrees())]
    assert alone.isfinite().all()
    assert mini.relative(alone, exact) > 100 * TOLERANCE  # the control: it is not the exact run that was compared
    for degrees, sample in samples.items():
        assert mini.relative(sample, alone) <= TOLERANCE, degrees


@pytest.mark.parametrize("inner", [{"ring": 2}, {"ulysses": 2}, {"tensor": 2}], ids=str)
def test_displaced_patches_depend_on_the_cut_alone(processes, exact_run, inner):
    noise, sigmas, prompt, exact = exact_run(steps=4)
    samples = []
    for degrees in (Degrees(patch=2, patch_mode="displaced"), Degrees(patch=2, patch_mode="displaced", **inner)):
        model = processes(degrees)
        first, again = (sample_in_bands(model, noise, sigmas, prompt, 1, 1)[0] for _ in range(2))
        assert torch.equal(first, again)
        samples.append(first)
    assert mini.relative(samples[1], samples[0]) <= TOLERANCE
    assert 100 * TOLERANCE < mini.relative(samples[0], exact) < 0.1


def test_naive_patches_are_what_they_are(process_pools, processes, mini_file, exact_run):
    """The negative control: each half of the picture sampled as if the other were not there."""
    noise, sigmas, prompt, exact = exact_run(steps=4)
    displaced, naive = Degrees(patch=2, patch_mode="displaced"), Degrees(patch=2, patch_mode="naive")
    near = mini.relative(sample_in_bands(processes(displaced), noise, sigmas, prompt, 1, 1)[0], exact)
    far = mini.relative(sample_whole(process_pools.mini(mini_file, naive), noise, sigmas, prompt), exact)
    assert far > 3 * near


def test_an_odd_height_is_padded_in_bands_as_in_one_piece(processes, exact_run):
    """The last row's neighbour is the picture's first one, which another band has."""
    errors = [
        mini.relative(sample_in_bands(processes(Degrees()), noise, sigmas, prompt, 4, 1)[0], exact)
        for noise, sigmas, prompt, exact in (exact_run(steps=4, height=height) for height in (15, 16))
    ]
    assert errors[0] < 2 * errors[1]


def test_more_warm_up_is_closer_and_one_band_is_exact(processes, exact_run):
    """One band reads only its own fresh keys, whatever the warm-up; with several the warm-up is what makes it exact."""
    noise, sigmas, prompt, exact = exact_run(steps=4)
    model = processes(Degrees(pipe=2))
    errors = [mini.relative(sample_in_bands(model, noise, sigmas, prompt, 3, warm_up)[0], exact) for warm_up in (0, 2, 4)]
    assert errors[0] > errors[1] > errors[2]
    assert mini.relative(sample_in_bands(model, noise, sigmas, prompt, 1, 0)[0], exact) <= TOLERANCE


@st.composite
def degrees_within(draw, world: int):
    """Degrees with at most `world` ranks that combine."""
    sizes, room = [], world
    for axis in draw(st.permutations(AXES)):
        size = draw(st.integers(1, room))
        sizes.append((axis, size))
        room //= size
    given = dict(sizes)
    if given["pipe"] > 1:
        given["patch"] = 1
    return Degrees(**given, patch_mode="displaced")


# Loading is what takes time: few examples.
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(degrees_within(4), st.integers(1, 3), st.integers(2, 12), st.integers(3, 12), st.integers(1, 9), st.integers(1, 5))
def test_random_problems_equal_one_process(remote, mini_model, degrees, batch, height, width, text, bands):
    x, timestep, tensors = mini.inputs(batch=batch, height=2 * height - 1, width=width, text=text)
    cut = SequenceCut((1 / degrees.patch,) * degrees.patch, degrees.ring * degrees.ulysses, False)
    tokens = height * math.ceil(width / 2)
    model = remote(degrees)
    if not all(len(shard) for shard in cut.parts(Span(0, tokens))):
        with pytest.raises(ValueError, match="degree"):
            model.predict(ModelCall(x, timestep, tensors), lambda: None)
        return
    whole = mini.reference(mini_model, x, timestep, tensors)
    assert mini.relative(model.predict(ModelCall(x, timestep, tensors), lambda: None), whole) <= TOLERANCE
    prompt, sigmas = Prompt(tensors, {}, 1.0), linear_sigmas(2)
    with torch.inference_mode():
        expected = euler(lambda *given: mini.reference(mini_model, *given), x, sigmas, prompt)
    sample, _ = sample_in_bands(model, x, sigmas, prompt, 1 if degrees.displaced else bands, warm_up=2)
    assert mini.relative(sample, expected) <= TOLERANCE
