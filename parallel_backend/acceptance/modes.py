"""Checks of every mode and every product of modes on all devices, against one rank."""

import itertools
import math

import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.validate import all_degrees
from parallel_backend.quickstart.model import WEIGHTS

from . import tiny_flux
from .findings import Findings
from .one_rank import BANDS, SAME_KERNELS, picture_arguments, run_arguments
from .session import SelfTestSession

TIMES_ROUNDING = 2.0
"""A mode in half precision may be this many times as far from one rank as that one is from fp32: sums in another order."""
STALE = 0.1
"""The most relative difference of the tiny model's displaced run from the exact one."""
CLOSE = 30.0
"""The least decibels from pictures of exact steps. Two CPU ranks have 50 in 8 steps and 38 in 3. More ranks: more bands."""


def products(world: int) -> list[Degrees]:
    """All degrees of `world` ranks. Single modes first."""
    return sorted(all_degrees(world), key=lambda degrees: sum(size > 1 for size in degrees.sizes))


def look_at_modes(session: SelfTestSession, findings: Findings) -> None:
    """A model call of the tiny model: of every product in half precision, of single modes in fp32 too."""
    world, one, half = session.several(), session.reference(), session.settings.half
    call = tiny_flux.call()
    limits = {"fp32": SAME_KERNELS}
    if half is None:
        findings.leave_out("half precision", "these GPUs compute in none")
    else:
        rounding = tiny_flux.relative(one.calls[half], one.calls["fp32"])
        findings.note(f"{half} of one rank from fp32", rounding)
        limits[half] = TIMES_ROUNDING * rounding
    for (dtype, limit), degrees in itertools.product(limits.items(), products(world)):
        if dtype == "fp32" and max(degrees.sizes) < world:
            continue
        with findings.of(f"{degrees}, {dtype}"):
            model = session.load(degrees, dtype)
            outputs = [tiny_flux.as_one(model.predict(ModelCall(*call), session.poll)).float() for _ in range(2)]
            error = max(tiny_flux.relative(output, one.calls[dtype]) for output in outputs)
            findings.at_most(f"{degrees}, {dtype}", error, limit)


def look_at_bands(session: SelfTestSession, findings: Findings) -> None:
    """Runs with keys of a step ago: the same bits whether transfers overlap computing or not, and one rank's values."""
    one = session.reference()
    for degrees in stale_modes(session.several()):
        with findings.of(str(degrees)):
            model = session.load(degrees, "fp32")
            run = model, *run_arguments(), 1 if degrees.displaced else BANDS, 1, session.poll
            overlaps = (True, True, False, False)
            samples = [tiny_flux.as_one(sample_in_bands(*run, overlap=overlap)[0]) for overlap in overlaps]
            differing = sum(not torch.equal(sample, samples[0]) for sample in samples)
            findings.at_most(f"{degrees}: of 3 more runs, those with other bits", differing, 0)
            if degrees.displaced:
                findings.at_most(f"{degrees} from the exact run", tiny_flux.relative(samples[0], one.exact), STALE)
            else:
                apart = tiny_flux.relative(samples[0], one.bands)
                findings.at_most(f"{degrees} from bands on one rank", apart, SAME_KERNELS)


def look_at_pictures(session: SelfTestSession, findings: Findings) -> None:
    """How close the bundled model's latents under each mode are to those of one rank, in decibels."""
    world, one = session.several(), session.reference()
    arguments = picture_arguments(session.settings.steps)
    for degrees in stale_modes(world):
        with findings.of(str(degrees)):
            model = session.load(degrees, "fp32", WEIGHTS)
            sample, _ = sample_in_bands(model, *arguments, 1 if degrees.displaced else 2 * world, 1, session.poll)
            findings.at_least(f"{degrees}, dB", decibels(tiny_flux.as_one(sample), one.pictures), CLOSE)


def stale_modes(world: int) -> list[Degrees]:
    """The modes of all ranks that use keys of the step before."""
    return [Degrees(pipe=world), Degrees(patch=world, patch_mode="displaced")]


def decibels(sample: torch.Tensor, exact: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of latents; the peak is the span of `exact`. 200 if they are equal, NaN if one has NaN."""
    sample, exact = sample.double().cpu(), exact.double().cpu()
    error = (sample - exact).square().mean().item()
    if error == 0:
        return 200.0
    return 10 * math.log10((exact.max() - exact.min()).item() ** 2 / error) if error == error else math.nan
