"""Every product of exact modes equals one process, and the approximate mode depends on its schedule alone."""

import functools
import itertools
import math
import shutil

import pytest
import torch

from parallel_backend.config import Degrees
from parallel_backend.quickstart.model import MODEL_CONFIG, WEIGHTS
from parallel_backend.quickstart.prompt import encode_prompt
from parallel_backend.quickstart.sampling import Prompt, euler, linear_sigmas, sample_in_bands, sample_whole
from tests import tiny

TOLERANCE = 1e-5

PRODUCTS = [
    Degrees(batch=batch, pipe=pipe, ulysses=ulysses)
    for world in (1, 2, 4, 8)
    for batch, pipe, ulysses in itertools.product((1, 2, 4, 8), repeat=3)
    if batch * pipe * ulysses == world
]

CALLS = {
    "batch 2": {"batch": 2},
    "batch 3, splits unevenly": {"batch": 3},
    "odd sizes": {"batch": 2, "height": 15, "width": 11},
    "fewer entries and text tokens than ranks": {"batch": 1, "height": 4, "width": 10, "text": 3},
}


def name(degrees: Degrees) -> str:
    return f"batch{degrees.batch}-pipe{degrees.pipe}-ulysses{degrees.ulysses}"


@pytest.fixture(scope="module")
def exact_call(flux_model):
    """Case -> (inputs, diffusers' output)."""

    @functools.cache
    def make(case: str):
        given = tiny.inputs(tiny.FLUX, **CALLS[case])
        return given, tiny.reference(flux_model, *given)

    return make


@pytest.fixture(scope="module")
def exact_run(flux_model):
    """(steps, height, width, cfg) -> (noise, sigmas, prompt, diffusers' sample)."""

    @functools.cache
    def make(steps: int = 3, height: int = 16, width: int = 12, cfg: float = 1.0):
        noise, _, positive = tiny.inputs(tiny.FLUX, height=height, width=width)
        negative = tiny.inputs(tiny.FLUX, height=height, width=width, seed=2)[2]
        prompt, sigmas = Prompt(positive, negative, cfg), linear_sigmas(steps)
        with torch.inference_mode():
            sample = euler(functools.partial(tiny.reference, flux_model), noise, sigmas, prompt)
        return noise, sigmas, prompt, sample

    return make


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("degrees", PRODUCTS, ids=name)
def test_one_call_equals_one_process(remote, exact_call, degrees, case, measured):
    (x, timestep, tensors), expected = exact_call(case)
    output = remote(degrees).predict(x, timestep, tensors, lambda: None)
    assert output.shape == x.shape
    error = tiny.relative(output, expected)
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("bands", [1, 3, 4])
@pytest.mark.parametrize("degrees", PRODUCTS, ids=name)
def test_a_run_of_exact_steps_equals_one_process(remote, exact_run, degrees, bands, measured):
    noise, sigmas, prompt, expected = exact_run(height=15, width=11)
    sample, stats = sample_in_bands(remote(degrees), noise, sigmas, prompt, bands, warm_up=3)
    error = tiny.relative(sample, expected)
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE
    assert len(stats) == degrees.world


@pytest.mark.parametrize(
    "degrees", [Degrees(batch=2, pipe=2), Degrees(pipe=2, ulysses=2), Degrees(batch=2, pipe=2, ulysses=2)], ids=name
)
def test_cfg_equals_one_process(remote, exact_run, degrees):
    noise, sigmas, prompt, expected = exact_run(cfg=3.0)
    sample, _ = sample_in_bands(remote(degrees), noise, sigmas, prompt, 3, warm_up=3)
    assert tiny.relative(sample, expected) <= TOLERANCE


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
        given = {"x": x, "timestep": timestep, "tensors": tensors} | changed
        assert tiny.relative(model.predict(**given, poll=lambda: None), expected) > 100 * TOLERANCE


@pytest.mark.parametrize("warm_up", [0, 1])
def test_bands_with_old_keys_depend_on_the_schedule_alone(remote, exact_run, warm_up):
    noise, sigmas, prompt, exact = exact_run(steps=4)
    samples = {}
    for degrees in (
        Degrees(),
        Degrees(pipe=2),
        Degrees(ulysses=2),
        Degrees(batch=2),
        Degrees(pipe=4),
        Degrees(pipe=2, ulysses=2),
        Degrees(pipe=8),
    ):
        model = remote(degrees)
        first, _ = sample_in_bands(model, noise, sigmas, prompt, 4, warm_up)
        again, _ = sample_in_bands(model, noise, sigmas, prompt, 4, warm_up)
        assert torch.equal(first, again), name(degrees)
        samples[name(degrees)] = first
    alone = samples[name(Degrees())]
    assert alone.isfinite().all()
    assert tiny.relative(alone, exact) > 100 * TOLERANCE  # the control: it is not the exact run that was compared
    for degrees, sample in samples.items():
        assert tiny.relative(sample, alone) <= TOLERANCE, degrees


def test_more_warm_up_is_closer_and_one_band_is_exact(remote, exact_run):
    """One band reads only its own fresh keys, whatever the warm-up; with several the warm-up is what makes it exact."""
    noise, sigmas, prompt, exact = exact_run(steps=4)
    model = remote(Degrees(pipe=2))
    errors = [tiny.relative(sample_in_bands(model, noise, sigmas, prompt, 3, warm_up)[0], exact) for warm_up in (0, 2, 4)]
    assert errors[0] > errors[1] > errors[2]
    assert tiny.relative(sample_in_bands(model, noise, sigmas, prompt, 1, 0)[0], exact) <= TOLERANCE


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """The bundled model, copied since it may be replaced during the session, and what one process samples with it."""
    path = tmp_path_factory.mktemp("mini") / WEIGHTS.name
    shutil.copyfile(WEIGHTS, path)
    tensors = {}
    for text in ("3 1 4 1", ""):
        context, pooled = encode_prompt(text)
        tensors[text] = {"context": context, "pooled": pooled}
    prompt, sigmas = Prompt(tensors["3 1 4 1"], tensors[""], 3.0), linear_sigmas(4)
    noise = torch.randn(1, MODEL_CONFIG["in_channels"] // 4, 16, 16, generator=torch.Generator().manual_seed(3))
    whole = tiny.whole_model(path)
    with torch.inference_mode():
        sample = euler(functools.partial(tiny.reference, whole), noise, sigmas, prompt)
    return path, noise, sigmas, prompt, sample


@pytest.mark.parametrize(
    "degrees",
    [Degrees(pipe=2), Degrees(ulysses=2), Degrees(batch=2), Degrees(pipe=2, ulysses=2)],
    ids=name,
)
def test_the_bundled_model_equals_one_process(pools, mini, degrees, measured):
    path, noise, sigmas, prompt, expected = mini
    model = pools.load(path, degrees)
    whole = sample_whole(model, noise, sigmas, prompt)
    banded, _ = sample_in_bands(model, noise, sigmas, prompt, 4, warm_up=4)
    error = max(tiny.relative(whole, expected), tiny.relative(banded, expected))
    measured("relative error of exact modes", error)
    assert math.isfinite(error)
    assert error <= TOLERANCE
