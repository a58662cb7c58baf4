"""Checks every mode on all devices against one rank."""

import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.validate import all_degrees

from . import tiny_model
from .findings import Findings
from .one_rank import BANDS, SAME_KERNELS, rounding, run_arguments
from .session import OneRank, SelfTestSession

STALE = 0.1
"""The most relative difference of the tiny model's displaced run from the exact one."""


def modes_of(world: int) -> list[Degrees]:
    """The modes of `world` ranks, and one product of two: a pipeline whose stages exchange heads, so that transfers of
    several communicators are under way at once. Other products make no other transfers."""
    modes = [degrees for degrees in all_degrees(world) if max(degrees.sizes) == world]
    stages = next((stages for stages in range(2, world) if world % stages == 0), None)
    return modes if stages is None else [*modes, Degrees(pipe=stages, ulysses=world // stages)]


def look_at_modes(session: SelfTestSession, findings: Findings) -> None:
    """A model call in fp32; in half precision where NCCL adds up; and a run with keys of a step ago."""
    world, one, half = session.several(), session.reference(), session.settings.half
    call = tiny_model.call()
    tries = [(degrees, "fp32", SAME_KERNELS) for degrees in modes_of(world)]
    if half is None:
        findings.leave_out("half precision", "these GPUs compute in none")
    else:
        tries.append((Degrees(tensor=world), half, rounding(one, half)))
    for degrees, dtype, limit in tries:
        with findings.of(f"{degrees}, {dtype}"):
            model = session.load(degrees, dtype)
            outputs = [tiny_model.as_one(model.predict(tiny_model.on_ranks(*call), session.poll)).float() for _ in range(2)]
            error = max(tiny_model.relative(output, one.calls[dtype]) for output in outputs)
            findings.at_most(f"{degrees}, {dtype}", error, limit)
            if degrees.displaced or degrees.pipe == world:
                _look_at_run(session, findings, one, model, degrees)


def _look_at_run(
    session: SelfTestSession, findings: Findings, one: OneRank, model: RemoteTransformer, degrees: Degrees
) -> None:
    """Transfers beside computing give the bits that transfers give which are waited for."""
    run = model, *run_arguments(), 1 if degrees.displaced else BANDS, 1, session.poll
    beside, apart = (tiny_model.as_one(sample_in_bands(*run, overlap=overlap)[0]) for overlap in (True, False))
    findings.expect(torch.equal(beside, apart), f"{degrees}: transfers beside computing give other bits")
    expected, limit = (one.exact, STALE) if degrees.displaced else (one.bands, SAME_KERNELS)
    findings.at_most(f"{degrees}, a run", tiny_model.relative(beside, expected), limit)
