"""Every product of exact modes equals one process, and the approximate mode depends on its schedule alone.

Ranks run the tiny Flux by a class (quickstart/mini_flux.py), as they run ComfyUI's; diffusers' forward is the reference. Its
family runs if a class does not: masks of text, tensor ranks that do not divide the heads, naive patches, heads in groups.
"""

import functools
import itertools
import math
import shutil
from collections.abc import Callable

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.proven_class import call_of, prompt_for_class, proven
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.processes import local as launch
from parallel_backend.processes.pool import Pool
from parallel_backend.quickstart.codec import CHANNELS
from parallel_backend.quickstart.model import WEIGHTS, mini_flux
from parallel_backend.quickstart.prompt import encode_prompt
from parallel_backend.wire.timeline_kinds import TRANSFER
from testing import tiny
from testing.models import on_ranks
from tests.support import grouping_rank

pytestmark = pytest.mark.threads

TOLERANCE = 1e-5

PRODUCTS = [
    Degrees(*sizes, patch_mode="displaced")
    for world in (1, 2, 4, 8)
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES))
    if math.prod(sizes) == world and 1 in (sizes[AXES.index("pipe")], sizes[AXES.index("patch")])
]
UNEVEN = [Degrees(ulysses=3), Degrees(ring=3), Degrees(ulysses=3, ring=2)]
"""8 heads and the token counts below divide by none of these."""
UNEVEN_HEADS = [Degrees(tensor=3), Degrees(tensor=3, ulysses=2)]
"""Of a family alone: a class's heads are the same for all tensor ranks."""

CALLS = {
    "batch 2": {"batch": 2},
    "batch 3, splits unevenly": {"batch": 3},
    "odd sizes": {"batch": 2, "height": 15, "width": 11},
    "fewer entries and text tokens than ranks": {"batch": 1, "height": 4, "width": 10, "text": 3},
}


def name(degrees: Degrees) -> str:
    return "-".join(f"{axis}{size}" for axis, size in zip(AXES, degrees.sizes, strict=True) if size > 1) or "one"


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
    """(steps, height, width, cfg) -> (noise, sigmas, the class's prompt, diffusers' sample)."""

    @functools.cache
    def make(steps: int = 3, height: int = 16, width: int = 12, cfg: float = 1.0):
        noise, _, positive = tiny.inputs(tiny.FLUX, height=height, width=width)
        negative = tiny.inputs(tiny.FLUX, height=height, width=width, seed=2)[2]
        prompt, sigmas = Prompt(positive, negative, cfg), linear_sigmas(steps)
        with torch.inference_mode():
            sample = euler(functools.partial(tiny.reference, flux_model), noise, sigmas, prompt)
        return noise, sigmas, prompt_for_class(prompt), sample

    return make


@pytest.fixture(scope="module")
def by_class(pools, flux_file) -> Callable[[Degrees], RemoteTransformer]:
    """The tiny Flux on ranks, by its class."""
    return lambda degrees: pools.load(flux_file, degrees, own=tiny.own_flux(degrees.tensor))


@pytest.fixture
def processes(process_pools, flux_file) -> Callable[[Degrees], RemoteTransformer]:
    """`by_class` on ranks in processes: for whole runs, which threads of one process take too long for."""
    return lambda degrees: process_pools.load(flux_file, degrees, own=tiny.own_flux(degrees.tensor))


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
def test_one_call_equals_one_process(by_class, exact_call, product, measured):
    given, expected = exact_call("odd sizes")
    error = tiny.relative(by_class(product).predict(tiny.own_call(*given), lambda: None), expected)
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("degrees", IN_PROCESSES, ids=name)
def test_processes_equal_one_process(processes, exact_call, exact_run, degrees, measured):
    given, expected = exact_call("odd sizes")
    model = processes(degrees)
    noise, sigmas, prompt, sampled = exact_run(height=15, width=11)
    sample, stats = sample_in_bands(model, noise, sigmas, prompt, 1 if degrees.displaced else 3, warm_up=3)
    error = max(tiny.relative(model.predict(tiny.own_call(*given), lambda: None), expected), tiny.relative(sample, sampled))
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE
    assert len(stats) == degrees.world


@pytest.mark.parametrize("case", [case for case in CALLS if case != "odd sizes"])
@pytest.mark.parametrize("degrees", [d for d in PRODUCTS if d.world <= 2] + UNEVEN, ids=name)
def test_other_calls_equal_one_process(by_class, exact_call, degrees, case, measured):
    given, expected = exact_call(case)
    output = by_class(degrees).predict(tiny.own_call(*given), lambda: None)
    assert output.shape == expected.shape
    error = tiny.relative(output, expected)
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE


def masked_reference(model: torch.nn.Module, x: torch.Tensor, timestep: torch.Tensor, tensors: dict) -> torch.Tensor:
    """diffusers' own forward with its own attention mask over the text's keys."""
    mask = tensors["text_mask"]
    image = mask.new_ones(len(mask), x.shape[2] * x.shape[3] // 4)
    forward = functools.partial(model, joint_attention_kwargs={"attention_mask": torch.cat((mask, image), 1)[:, None, None]})
    return tiny.reference(forward, x, timestep, tensors)


def in_all_tiers(degrees: Degrees) -> pytest.param:
    return pytest.param(
        degrees, id=name(degrees), marks=[pytest.mark.full] * (degrees not in AXES_AND_SOME + UNEVEN + UNEVEN_HEADS)
    )


@pytest.mark.parametrize("product", map(in_all_tiers, SMALLER + UNEVEN + UNEVEN_HEADS), indirect=True)
def test_a_text_mask_equals_one_process(remote, flux_model, product, measured):
    x, timestep, tensors = tiny.inputs(tiny.FLUX, batch=2, height=10, width=12, text=9)
    mask = torch.arange(9)[None] < torch.tensor([[4], [9]])  # the first entry's padding falls to several ranks whole
    tensors = tensors | {"text_mask": mask}
    expected = masked_reference(flux_model, x, timestep, tensors)
    model = remote(product)
    error = tiny.relative(model.predict(ModelCall(x, timestep, tensors), lambda: None), expected)
    measured("relative error of exact modes with a mask", error)
    assert error <= TOLERANCE
    prompt, sigmas = Prompt(tensors, {}, 1.0), linear_sigmas(1)
    bands = 1 if product.displaced else 3
    expected = euler(functools.partial(masked_reference, flux_model), x, sigmas, prompt)
    assert tiny.relative(sample_in_bands(model, x, sigmas, prompt, bands, warm_up=1)[0], expected) <= TOLERANCE


def test_the_mask_test_sees_the_mask(flux_model):
    x, timestep, tensors = tiny.inputs(tiny.FLUX, batch=2, height=10, width=12, text=9)
    every, some = torch.ones(2, 9, dtype=torch.bool), torch.arange(9)[None] < torch.tensor([[4], [9]])
    whole, masked = (masked_reference(flux_model, x, timestep, tensors | {"text_mask": mask}) for mask in (every, some))
    assert tiny.relative(masked[:1], whole[:1]) > 100 * TOLERANCE
    assert tiny.relative(whole, tiny.reference(flux_model, x, timestep, tensors)) <= TOLERANCE


@pytest.mark.slow
@elsewhere
def test_a_run_of_exact_steps_equals_one_process(by_class, exact_run, product, measured):
    noise, sigmas, prompt, expected = exact_run(height=15, width=11)
    bands = 1 if product.displaced else 3
    sample, stats = sample_in_bands(by_class(product), noise, sigmas, prompt, bands, warm_up=3)
    error = tiny.relative(sample, expected)
    measured("relative error of exact modes", error)
    assert error <= TOLERANCE
    assert len(stats) == product.world


@pytest.mark.parametrize(
    "degrees", [Degrees(batch=2, pipe=2), Degrees(pipe=2, ulysses=2), Degrees(batch=2, pipe=2, ulysses=2)], ids=name
)
def test_cfg_equals_one_process(by_class, exact_run, degrees):
    noise, sigmas, prompt, expected = exact_run(cfg=3.0)
    sample, _ = sample_in_bands(by_class(degrees), noise, sigmas, prompt, 3, warm_up=3)
    assert tiny.relative(sample, expected) <= TOLERANCE


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    """A tiny SD3, whose joint sequence is [image, text]: its file, a latent of odd size, and what one process says."""
    model = tiny.random_sd3()
    path = tiny.save_original(model, tiny.SD3, tmp_path_factory.mktemp("sd3") / "sd3.safetensors", family="sd3")
    given = tiny.inputs(tiny.SD3, batch=2, height=15, width=12, family="sd3")
    prompt = Prompt(given[2], {}, 1.0)
    reference = functools.partial(tiny.sd3_reference, model)
    with torch.inference_mode():
        return path, given, reference(*given), euler(reference, given[0], linear_sigmas(2), prompt)


@pytest.mark.parametrize(
    "degrees", [in_all_tiers(d) for d in SMALLER if d.tensor * d.ulysses <= tiny.SD3["num_attention_heads"] and d.pipe <= 4]
)
def test_image_before_text_equals_one_process(pools, sd3, degrees, measured):
    path, (x, timestep, tensors), expected, sampled = sd3
    model = pools.load(path, degrees)
    bands = 1 if degrees.displaced else 3
    sample, _ = sample_in_bands(model, x, linear_sigmas(2), Prompt(tensors, {}, 1.0), bands, warm_up=2)
    error = max(
        tiny.relative(model.predict(ModelCall(x, timestep, tensors), lambda: None), expected), tiny.relative(sample, sampled)
    )
    measured("relative error of exact modes, SD3", error)
    assert error <= TOLERANCE


def test_the_comparison_sees_every_input(by_class, exact_call):
    """The control of the table above: a small change of any input moves the output by far more than the tolerance."""
    (x, timestep, tensors), expected = exact_call("batch 2")
    model = by_class(Degrees(pipe=2))
    for changed in (
        {"timestep": timestep * 1.01},
        {"tensors": tensors | {"guidance": tensors["guidance"] + 0.1}},
        {"tensors": tensors | {"pooled": tensors["pooled"].flip(0)}},
        {"tensors": tensors | {"context": tensors["context"].flip(0)}},
        {"x": x.roll(2, dims=2)},
    ):
        call = tiny.own_call(**{"x": x, "timestep": timestep, "tensors": tensors} | changed)
        assert tiny.relative(model.predict(call, lambda: None), expected) > 100 * TOLERANCE


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
    assert tiny.relative(alone, exact) > 100 * TOLERANCE  # the control: it is not the exact run that was compared
    for degrees, sample in samples.items():
        assert tiny.relative(sample, alone) <= TOLERANCE, degrees


@pytest.mark.parametrize("inner", [{}, {"ring": 2}, {"ulysses": 2}, {"tensor": 2}], ids=str)
def test_displaced_patches_depend_on_the_cut_alone(processes, exact_run, inner):
    noise, sigmas, prompt, exact = exact_run(steps=4)
    samples = []
    for degrees in (Degrees(patch=2, patch_mode="displaced"), Degrees(patch=2, patch_mode="displaced", **inner)):
        model = processes(degrees)
        first, again = (sample_in_bands(model, noise, sigmas, prompt, 1, 1)[0] for _ in range(2))
        assert torch.equal(first, again)
        samples.append(first)
    assert tiny.relative(samples[1], samples[0]) <= TOLERANCE
    assert 100 * TOLERANCE < tiny.relative(samples[0], exact) < 0.1


def test_naive_patches_are_what_they_are(process_pools, processes, flux_file, exact_run):
    """The negative control: each half of the picture sampled as if the other were not there."""
    noise, sigmas, prompt, exact = exact_run(steps=4)
    displaced, naive = Degrees(patch=2, patch_mode="displaced"), Degrees(patch=2, patch_mode="naive")
    near = tiny.relative(sample_in_bands(processes(displaced), noise, sigmas, prompt, 1, 1)[0], exact)
    prompt = Prompt(tiny.inputs()[2], {}, 1.0)
    far = tiny.relative(sample_whole(process_pools.load(flux_file, naive), noise, sigmas, prompt), exact)
    assert far > 3 * near


@pytest.mark.parametrize("bands", [2, 4])
def test_an_odd_height_is_padded_in_bands_as_in_one_piece(processes, exact_run, bands):
    """The last row's neighbour is the picture's first one, which another band has."""
    errors = [
        tiny.relative(sample_in_bands(processes(Degrees()), noise, sigmas, prompt, bands, 1)[0], exact)
        for noise, sigmas, prompt, exact in (exact_run(steps=4, height=height) for height in (15, 16))
    ]
    assert errors[0] < 2 * errors[1]


def test_more_warm_up_is_closer_and_one_band_is_exact(processes, exact_run):
    """One band reads only its own fresh keys, whatever the warm-up; with several the warm-up is what makes it exact."""
    noise, sigmas, prompt, exact = exact_run(steps=4)
    model = processes(Degrees(pipe=2))
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
    noise = torch.randn(1, CHANNELS, 16, 16, generator=torch.Generator().manual_seed(3))
    whole = tiny.whole_model(path)
    with torch.inference_mode():
        sample = euler(functools.partial(tiny.reference, whole), noise, sigmas, prompt)
    own = proven(mini_flux(), call_of(noise, prompt.positive), Degrees(pipe=2, ulysses=2), path.name)
    return path, own, noise, sigmas, prompt_for_class(prompt), sample


@pytest.mark.parametrize(
    "degrees",
    [Degrees(pipe=2), Degrees(ulysses=2), Degrees(batch=2), Degrees(pipe=2, ulysses=2)],
    ids=name,
)
def test_the_bundled_model_equals_one_process(process_pools, mini, degrees, measured):
    path, own, noise, sigmas, prompt, expected = mini
    model = process_pools.load(path, degrees, own=own)
    whole = sample_whole(model, noise, sigmas, prompt)
    banded, _ = sample_in_bands(model, noise, sigmas, prompt, 4, warm_up=4)
    error = max(tiny.relative(whole, expected), tiny.relative(banded, expected))
    measured("relative error of exact modes", error)
    assert math.isfinite(error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("degrees", [Degrees(ulysses=2), Degrees(ulysses=3), Degrees(ring=2, ulysses=2)], ids=name)
def test_heads_in_groups_equal_one_process(exact_call, flux_file, monkeypatch, process_pools, degrees):
    """As on CUDA. The control: transfers, of which groups make more."""
    given, expected = exact_call("odd sizes")
    plain, transfers = process_pools(degrees.world), []
    monkeypatch.setattr(launch, "rank_entry", lambda: grouping_rank.grouping)  # of ranks to come
    grouping = Pool(("cpu",) * degrees.world)
    try:
        for pool in (grouping, plain):
            process_pools.forget(degrees.world)
            model = on_ranks(pool, open_checkpoint(flux_file), degrees, "fp32", "sdpa", lambda: None)
            model.begin_timeline()
            assert tiny.relative(model.predict(ModelCall(*given), lambda: None), expected) <= TOLERANCE
            kinds = model.timeline(lambda: None)[0].labels[:, 0]
            transfers.append(int((kinds == TRANSFER).sum()))
    finally:
        grouping.close()
    assert transfers[0] > transfers[1]
