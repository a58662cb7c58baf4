"""Every product of exact modes equals one process, and the approximate mode depends on its schedule alone.

The tiny model is of the mini class, which ranks run as they run ComfyUI's.
"""

import functools
import itertools
import math
import shutil
from collections.abc import Callable

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.proven_class import tensors_of
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.quickstart.codec import CHANNELS
from parallel_backend.quickstart.model import WEIGHTS
from parallel_backend.quickstart.prompt import encode_prompt
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
    "batch 2": {"batch": 2},
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


@pytest.fixture(scope="module")
def product(request) -> Degrees:
    """A fixture, so that pytest runs all tests of one product before the next one is loaded."""
    return request.param


def axes_used(degrees: Degrees) -> int:
    return sum(size > 1 for size in degrees.sizes)


def tier(degrees: Degrees) -> list[pytest.MarkDecorator]:
    """Four ranks have every pair of modes in all tiers. What eight add, products of three, is some of those in processes in
    the default tier, and all of them in the full one."""
    return [pytest.mark.slow] * (degrees.world > 4) + [pytest.mark.full] * (degrees.world == 8)


SMALLER = [degrees for degrees in PRODUCTS if degrees.world <= 4]
"""Every pair of modes. What eight ranks add, products of three, is seen in the tables around."""
IN_PROCESSES = [d for d in PRODUCTS if axes_used(d) <= 2 and max(d.sizes) == 2] + [
    Degrees(batch=2, pipe=2, ulysses=2),
    Degrees(pipe=2, ring=2, tensor=2),
    Degrees(patch=2, ulysses=2, tensor=2, patch_mode="displaced"),
]
"""Every axis, every pair of axes, and some products of three: what they need of Gloo and of each other's processes. The
tables are of ranks in threads, and have in the default tier what is not among these."""
elsewhere = pytest.mark.parametrize(
    "product",
    [
        pytest.param(
            degrees,
            marks=[*tier(degrees), *([pytest.mark.full] if degrees in IN_PROCESSES and degrees.world > 1 else [])],
            id=name(degrees),
        )
        for degrees in PRODUCTS + UNEVEN
    ],
    indirect=True,
)
AXES_AND_SOME = [
    *(degrees for degrees in PRODUCTS if degrees.world <= 2),
    *(Degrees(pipe=2, ulysses=2), Degrees(ring=2, tensor=2), Degrees(patch=2, ulysses=2, patch_mode="displaced")),
]


@elsewhere
def test_one_call_equals_one_process(remote, exact_call, product, measured):
    given, expected = exact_call("odd sizes")
    error = mini.relative(remote(product).predict(ModelCall(*given), lambda: None), expected)
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("degrees", IN_PROCESSES, ids=name)
def test_processes_equal_one_process(processes, exact_call, exact_run, degrees, measured):
    given, expected = exact_call("odd sizes")
    model = processes(degrees)
    noise, sigmas, prompt, sampled = exact_run(height=15, width=11)
    sample, stats = sample_in_bands(model, noise, sigmas, prompt, 1 if degrees.displaced else 3, warm_up=3)
    error = max(mini.relative(model.predict(ModelCall(*given), lambda: None), expected), mini.relative(sample, sampled))
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE
    assert len(stats) == degrees.world


@pytest.mark.parametrize("case", [case for case in CALLS if case != "odd sizes"])
@pytest.mark.parametrize("degrees", [d for d in PRODUCTS if d.world <= 2] + UNEVEN, ids=name)
def test_other_calls_equal_one_process(remote, exact_call, degrees, case, measured):
    given, expected = exact_call(case)
    output = remote(degrees).predict(ModelCall(*given), lambda: None)
    assert output.shape == expected.shape
    error = mini.relative(output, expected)
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE


@pytest.mark.slow
@elsewhere
def test_a_run_of_exact_steps_equals_one_process(remote, exact_run, product, measured):
    noise, sigmas, prompt, expected = exact_run(height=15, width=11)
    bands = 1 if product.displaced else 3
    sample, stats = sample_in_bands(remote(product), noise, sigmas, prompt, bands, warm_up=3)
    error = mini.relative(sample, expected)
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE
    assert len(stats) == product.world


@pytest.mark.parametrize(
    "degrees", [Degrees(batch=2, pipe=2), Degrees(pipe=2, ulysses=2), Degrees(batch=2, pipe=2, ulysses=2)], ids=name
)
def test_cfg_equals_one_process(remote, exact_run, degrees):
    noise, sigmas, prompt, expected = exact_run(cfg=3.0)
    sample, _ = sample_in_bands(remote(degrees), noise, sigmas, prompt, 3, warm_up=3)
    assert mini.relative(sample, expected) <= TOLERANCE


def test_the_comparison_sees_every_input(remote, exact_call):
    """The control of the table above: a small change of any input moves the output by far more than the tolerance."""
    (x, timestep, tensors), expected = exact_call("batch 2")
    model = remote(Degrees(pipe=2))
    for changed in (
        {"timestep": timestep * 1.01},
        {"tensors": tensors | {"guidance": tensors["guidance"] + 0.1}},
        {"tensors": tensors | {"pooled": tensors["pooled"].flip(0)}},
        {"tensors": tensors | {"context": tensors["context"].flip(0)}},
        {"x": x.roll(2, dims=2)},
    ):
        call = ModelCall(**{"x": x, "timestep": timestep, "tensors": tensors} | changed)
        assert mini.relative(model.predict(call, lambda: None), expected) > 100 * TOLERANCE


BANDED = [
    Degrees(),
    Degrees(pipe=2),
    Degrees(ulysses=2),
    Degrees(pipe=2, ring=2),
    Degrees(batch=2),
    Degrees(pipe=4),
    Degrees(pipe=2, ulysses=2),
    Degrees(ring=2),
    Degrees(pipe=2, tensor=2),
    Degrees(pipe=2, ring=2, tensor=2),
    Degrees(pipe=8),
]
"""All of them in the full tier. The default tier has an axis of each kind, and one product."""


@pytest.mark.parametrize(
    ("warm_up", "every"),
    [
        (1, BANDED[:5]),
        (0, BANDED[:3]),
        pytest.param(1, BANDED, marks=pytest.mark.full),
        pytest.param(0, BANDED, marks=pytest.mark.full),
    ],
    ids=["1", "0", "1, all", "0, all"],
)
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


@pytest.mark.parametrize("inner", [{}, {"ring": 2}, {"ulysses": 2}, {"tensor": 2}], ids=str)
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


@pytest.mark.parametrize("bands", [2, 4])
def test_an_odd_height_is_padded_in_bands_as_in_one_piece(processes, exact_run, bands):
    """The last row's neighbour is the picture's first one, which another band has."""
    errors = [
        mini.relative(sample_in_bands(processes(Degrees()), noise, sigmas, prompt, bands, 1)[0], exact)
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


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The bundled model, copied since it may be replaced during the session, and what one process samples with it."""
    path = tmp_path_factory.mktemp("mini") / WEIGHTS.name
    shutil.copyfile(WEIGHTS, path)
    tensors = {}
    for text in ("3 1 4 1", ""):
        context, pooled = encode_prompt(text)
        tensors[text] = tensors_of({"context": context, "pooled": pooled})
    prompt, sigmas = Prompt(tensors["3 1 4 1"], tensors[""], 3.0), linear_sigmas(4)
    noise = torch.randn(1, CHANNELS, 16, 16, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return path, noise, sigmas, prompt, euler(functools.partial(mini.reference, mini.load(path)), noise, sigmas, prompt)


@pytest.mark.parametrize(
    "degrees",
    [Degrees(pipe=2), Degrees(ulysses=2), Degrees(batch=2), Degrees(pipe=2, ulysses=2)],
    ids=name,
)
def test_the_bundled_model_equals_one_process(process_pools, bundled, degrees, measured):
    path, noise, sigmas, prompt, expected = bundled
    model = process_pools.mini(path, degrees)
    whole = sample_whole(model, noise, sigmas, prompt)
    banded, _ = sample_in_bands(model, noise, sigmas, prompt, 4, warm_up=4)
    error = max(mini.relative(whole, expected), mini.relative(banded, expected))
    measured("relative error of exact modes", error)
    assert math.isfinite(error)
    assert error <= TOLERANCE
