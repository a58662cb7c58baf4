"""Every family: its layouts give diffusers' weights; one rank, exact modes at two and four, and PipeFusion's warm-up give
diffusers' own forward."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.band_cut import packed, unpacked
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.families.base import tensor_plan
from parallel_backend.families.base.patching import latents_of, like
from testing import tiny
from testing.cases import OF_EACH_FORM, all_cases
from testing.cases.case import PAIRS, Case
from tests.support.case_params import of_each_form, one_of_each

pytestmark = pytest.mark.threads

TOLERANCE = 1e-5
BF16_TOLERANCE = 0.012
CASES = all_cases()
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name, indirect=True)
every_family = pytest.mark.parametrize("case", one_of_each(CASES), indirect=True)
every_form = pytest.mark.parametrize("case", of_each_form(CASES), indirect=True)


Choices = Callable[[Case], Iterable[Any]]


def cases_with(
    name: str, choices: Choices, further: Choices = lambda case: (), quick: Choices | None = None
) -> pytest.MarkDecorator:
    """Every case with each of its `choices`, as the argument `name`; in the full tier also with the `further` ones.
    In the quick tier with the `quick` ones of its choices; None: with all."""
    params = [
        pytest.param(case, choice, id=f"{case.name}-{choice}", marks=marks or in_quick)
        for case in CASES
        for offered, marks in ((choices, ()), (further, pytest.mark.full))
        for choice in offered(case)
        for in_quick in [() if quick is None or choice in quick(case) else pytest.mark.slow]
    ]
    return pytest.mark.parametrize(("case", name), params, indirect=["case"])


def is_further(case: Case) -> bool:
    """Another one of its family, and of its class of cases, comes before it."""
    return case is not next(other for other in CASES if (other.family, type(other)) == (case.family, type(case)))


def shows_its_form(case: Case) -> bool:
    """Of the families of one form only one does."""
    return case.family in OF_EACH_FORM and not is_further(case)


def modes_of_two(case: Case) -> tuple[list[Degrees], list[Degrees], list[Degrees]]:
    """Of a case: modes for the default tier, those for the full tier, and those of the first for the quick one too.

    What a family itself decides is how its blocks are cut into stages, its layers over tensor ranks, its tokens over
    sequence ranks, and what of a prompt belongs to which batch entry. The last two are shown by a product, with two ways
    of sequence ranks in turn; a family of each form has the third. A family's further cases have other inputs and
    perhaps other layers, but attention of the same kind: stages or tensor ranks, in turn, are enough. PipeFusion's comes
    last: bands have use for the ranks as it leaves them. The quick tier has all but one of a family of each form, and
    tensor ranks of each other one, whose layers are its own.
    """
    single = {axis: Degrees(**{axis: 2}) for axis in ("ulysses", "tensor", "pipe", "batch", "ring")}
    single["patch"] = Degrees(patch=2, patch_mode="displaced")
    turn = CASES.index(case) % 2
    if is_further(case):
        every, quick = [single[("tensor", "pipe")[turn]]], []
    else:
        product = replace(single[("ring", "patch")[turn]], batch=2)
        alone = ("ulysses", "tensor", "pipe") if shows_its_form(case) else ("tensor", "pipe")
        every = [product, *(single[axis] for axis in alone)]
        quick = [product, single["tensor"], single["pipe"]] if shows_its_form(case) else [single["tensor"]]
    return every, [degrees for degrees in PAIRS if degrees not in every], quick


def banded_modes(case: Case, *modes: Degrees) -> list[Degrees]:
    """The modes, of a case that can be sampled."""
    return list(modes) if case.sampled else []


@pytest.fixture(scope="module", autouse=True)
def layers_outside_of_blocks_count_as_large():
    """So that tensor parallelism cuts them here as in real models."""
    with mock.patch.object(tensor_plan, "LARGE", 64):
        yield


@pytest.fixture(scope="module")
def case(request):
    """A fixture, so that pytest runs all tests of one case before the next."""
    return request.param


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(case)`: (diffusers' model, its file). One case's at a time: see `case`."""

    @functools.lru_cache(1)
    def make(name: str):
        case = next(case for case in CASES if case.name == name)
        base = tmp_path_factory.mktemp(name)
        model = case.model()
        return model, case.save(model, base / f"{name}.safetensors")

    return lambda case: make(case.name)


@pytest.fixture(scope="module")
def given_and_expected(made):
    """`given_and_expected(case, latent)`: a call's inputs, and diffusers' output."""

    @functools.lru_cache(2)
    def compute(name: str, latent: tuple[int, ...]):
        case = next(case for case in CASES if case.name == name)
        given = case.inputs(latent=latent)
        with torch.inference_mode():
            return given, case.reference(made(case)[0], *given)

    return lambda case, latent: compute(case.name, latent)


def sigmas_of(case, steps):
    return linear_sigmas(steps) * case.timestep / 0.7


def reference_run(case, model, x, tensors, steps):
    shapes = tuple(tuple(latent.shape) for latent in latents_of(x))

    def predict(given, timestep, tensors):
        return packed(latents_of(case.reference(model, like(x, unpacked(given, shapes)), timestep, tensors)))

    with torch.inference_mode():
        end = euler(predict, packed(latents_of(x)), sigmas_of(case, steps), Prompt(tensors, {}, 1.0))
    return like(x, unpacked(end, shapes))


def compare(case, pools, made, given_and_expected, degrees, latent, measured):
    given, expected = given_and_expected(case, latent)
    output = pools.load(made(case)[1], degrees).predict(ModelCall(*given), lambda: None)
    for part, wanted in zip(latents_of(output), latents_of(expected), strict=True):
        assert part.shape == wanted.shape
        assert wanted.std() > 0.01
        assert tiny.relative(part, wanted) <= TOLERANCE
    error = tiny.relative(output, expected)
    measured(f"relative error of exact calls, {case.name}", error)
    assert error <= TOLERANCE


def sizes(case: Case) -> tuple[list[str], list[str]]:
    """In the default tier those that neither two ranks' calls nor two ranks' bands have, in the tests below."""
    elsewhere = case.odd is None or (not is_further(case) and banded_modes(case, Degrees(pipe=2)))
    return ([], ["whole"]) if elsewhere else (["whole"], [])


@cases_with(
    "size",
    lambda case: sizes(case)[0],
    lambda case: sizes(case)[1] + (["odd"] if case.odd else []),
    quick=lambda case: () if is_further(case) else ("whole",),
)
def test_one_rank_equals_diffusers(case, size, pools, made, given_and_expected, measured):
    latent = case.latent if size == "whole" else case.odd
    compare(case, pools, made, given_and_expected, Degrees(), latent, measured)


@pytest.mark.slow
@every_form
def test_the_comparison_sees_every_input(case, pools, made):
    model, file = made(case)
    x, timestep, tensors = case.inputs()
    with torch.inference_mode():
        expected = case.reference(model, x, timestep, tensors)
    remote = pools.load(file, Degrees())
    parts = latents_of(x)
    rolled = [like(x, tuple(part.roll(2 * (part is other), dims=-1) for part in parts)) for other in parts]
    changes = [*((each, timestep, tensors) for each in rolled), (x, timestep * 1.01, tensors)]
    changes += [
        (x, timestep, tensors | {name: value.flip(0)})
        for name, value in tensors.items()
        if value.is_floating_point() and not torch.equal(value, value.flip(0))
    ]
    for given in changes:
        assert tiny.relative(remote.predict(ModelCall(*given), lambda: None), expected) > 10 * TOLERANCE


@cases_with("degrees", *(lambda case, tier=tier: modes_of_two(case)[tier] for tier in range(3)))
def test_exact_modes_equal_diffusers(case, degrees, pools, made, given_and_expected, measured):
    compare(case, pools, made, given_and_expected, degrees, case.odd or case.latent, measured)


@pytest.mark.slow
@cases_with(
    "degrees",
    lambda case: () if is_further(case) else banded_modes(case, Degrees(pipe=2)),
    lambda case: banded_modes(case, *[Degrees(pipe=2)] * is_further(case), Degrees(ulysses=2)),
)
def test_pipefusion_that_only_warms_up_equals_diffusers(case, degrees, pools, made, measured):
    model, file = made(case)
    x, _, tensors = case.inputs()
    found, _ = sample_in_bands(
        pools.load(file, degrees), x, sigmas_of(case, 2), Prompt(tensors, {}, 1.0), case.bands, warm_up=2
    )
    error = tiny.relative(found, reference_run(case, model, x, tensors, 2))
    measured(f"relative error of PipeFusion's warm-up, {case.name}", error)
    assert error <= TOLERANCE


@pytest.mark.slow
@cases_with(
    "degrees",
    lambda case: banded_modes(case, Degrees(pipe=2)) if shows_its_form(case) else (),
    lambda case: () if shows_its_form(case) else banded_modes(case, Degrees(pipe=2)),
)
def test_bands_with_old_keys_depend_on_the_schedule_alone(case, degrees, pools, made):
    model, file = made(case)
    x, _, tensors = case.inputs()
    prompt, sigmas = Prompt(tensors, {}, 1.0), sigmas_of(case, 3)
    alone, piped = (
        sample_in_bands(pools.load(file, degrees), x, sigmas, prompt, case.bands, 1)[0] for degrees in (Degrees(), degrees)
    )
    assert tiny.relative(piped, alone) <= TOLERANCE
    assert 2 * TOLERANCE < tiny.relative(alone, reference_run(case, model, x, tensors, 3)) < 0.5  # keys were old


@pytest.mark.parametrize("case", of_each_form(CASES, quick=("wan-animate-2",)), indirect=True)
def test_bf16_does_not_round_the_timestep(case, pools, made, measured):
    model, file = made(case)
    x, timestep, tensors = case.inputs()
    timestep = timestep * 1.0028  # halfway between two of bf16
    output = pools.load(file, Degrees(), "bf16").predict(ModelCall(x, timestep, tensors), lambda: None)
    with torch.inference_mode():
        seen = ((timestep * 1000).bfloat16() / 1000).bfloat16().float() if case.rounds_time else timestep
        expected = case.reference(model, x, seen, tensors)
        rounded = case.reference(model, x, timestep.bfloat16().float(), tensors)
    error = tiny.relative(tuple(part.float() for part in latents_of(output)), latents_of(expected))
    measured(f"relative error in bf16, {case.name}", error)
    assert error <= BF16_TOLERANCE
    if timestep.max() > 1 and not case.fine_time:  # times of 0 ... 1 lose nothing that shows
        assert tiny.relative(rounded, expected) > BF16_TOLERANCE
