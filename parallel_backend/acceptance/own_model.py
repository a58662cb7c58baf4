"""Checks with the user's model: the host itself, one rank and all ranks sample the same
noise with it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_own_class
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import resolve_dtype
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.calls.patching import Latents, latents_of
from parallel_backend.own_class.calls.tried_calls import one_entry
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.trial import trial
from parallel_backend.wire.sampling import RunStats

from . import tiny_model
from .session import Findings, NotLookedAt, OwnModel, SelfTestSession

REHEARSAL = 2
"""The number of steps before the timed ones: one whole call, and one in bands."""
CLOSE = {True: 35.0, False: 20.0}
"""The least decibels from the first run, for exact modes (True) and for bands: relative differences of about 0.15 and 0.8.
bf16 rounds, and with random noise bands differ more than with an image's."""

Run = tuple[torch.Tensor, bool, dict[str, Any]]
"""The sample, whether its mode is exact, and figures for the JSON."""


@dataclass(frozen=True)
class Problem:
    """The inputs of all runs: the call for which the class was tried, in its own size, with other noise."""

    checkpoint: Checkpoint
    own: OwnClass
    proof: Proof
    noise: torch.Tensor | Latents
    prompt: Prompt
    steps: int
    dtype: str


def problem_of(session: SelfTestSession, model: OwnModel) -> Problem:
    """Return the problem for the user's model and its last call. Its class has the proofs of a trial of that call for all
    devices."""
    call, world = one_entry(model.call), session.world
    proof = trial(model.own, call, model.times, lambda _share: session.poll(), world > 1, world > 1, world)
    own = replace(model.own, blocks=proof.blocks, latent=proof.latent)
    checkpoint = open_own_class(model.path, own)
    built = replace(checkpoint.built, call=call)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        latents = built.noise((1, *model.call.latents[0].shape[1:]))
    tensors = built.example(0)
    prompt = Prompt(tensors, tensors, 1.0, model.times[0])
    dtype = resolve_dtype("default", checkpoint.dtype, session.settings.devices, built.own.halves)
    noise = latents[0] if len(latents) == 1 else latents
    return Problem(replace(checkpoint, built=built), own, proof, noise, prompt, session.settings.steps, dtype)


def modes_of(world: int) -> list[Degrees]:
    """Return one rank, then the modes of all ranks for one image; exact modes come first."""
    several = [Degrees(ulysses=world), Degrees(ring=world), Degrees(tensor=world), Degrees(pipe=world)]
    return [Degrees(), *(several if world > 1 else [])]


def look_at_model(session: SelfTestSession, findings: Findings) -> None:
    if session.settings.model is None:
        raise NotLookedAt("the node Parallel Self-Test has no model")
    problem = problem_of(session, session.settings.model)
    name = problem.checkpoint.path.name
    runs: list[dict[str, Any]] = []
    findings.note("file", name)
    findings.note("class", problem.own.name)
    findings.note("weight_dtype", problem.dtype)
    findings.note("latent", list(latents_of(problem.noise)[0].shape))
    findings.note("steps", problem.steps)
    findings.note("runs", runs)
    first: torch.Tensor | None = None

    def note(mode: str, sample: torch.Tensor, exact: bool, figures: dict[str, Any]) -> None:
        nonlocal first
        run = {"mode": mode} | figures
        if first is None:
            first = sample
        else:
            run["dB"] = round(decibels(sample, first), 1)
            findings.expect(run["dB"] >= CLOSE[exact], f"{mode} is {run['dB']} dB from the first run, below {CLOSE[exact]}")
        findings.expect(bool(sample.isfinite().all()), f"{mode} gave values that are not finite")
        runs.append(run)

    try:
        session.end_ranks()
        note(f"{session.host.name}, no ranks", *_native(session, problem))
    except NotLookedAt as why:
        findings.leave_out("the same model without ranks", str(why))
    for degrees in modes_of(session.world):
        with findings.of(str(degrees)):  # which is left out if the model cannot be cut so, or does not fit
            problem.proof.check(degrees, name)
            note(str(degrees), *_on_ranks(session, problem, degrees))


def _native(session: SelfTestSession, problem: Problem) -> Run:
    if session.host.native is None:
        raise NotLookedAt("only the node Parallel Self-Test can load it into ComfyUI")
    if not isinstance(problem.noise, torch.Tensor):
        raise NotLookedAt("the node calls ComfyUI's model with one latent alone")
    noise = problem.noise
    with session.host.native(problem.checkpoint) as predict:

        def watched(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            session.poll()
            return predict(x, timestep, tensors)

        def sample(steps: int) -> torch.Tensor:
            return euler(watched, noise, linear_sigmas(steps), problem.prompt)

        latent, seconds = _timed(sample, problem.steps)
    return latent, True, {"seconds_per_step": seconds}


def _on_ranks(session: SelfTestSession, problem: Problem, degrees: Degrees) -> Run:
    model = session.load(degrees, problem.dtype, problem.checkpoint.path, problem.own)
    in_bands = degrees.pipe > 1 and problem.own.latent is not None
    stats: list[RunStats] = []

    def sample(steps: int) -> torch.Tensor:
        nonlocal stats
        inputs = model, problem.noise, linear_sigmas(steps), problem.prompt
        if in_bands:
            latent, stats = sample_in_bands(*inputs, 2 * degrees.pipe, 1, session.poll)
        else:
            latent = sample_whole(*inputs, session.poll)
            stats = model.close_run(0, session.poll)
        return tiny_model.as_one(latent)

    latent, seconds = _timed(sample, problem.steps)
    peaks, waits = [rank.peak_bytes for rank in stats], [round(rank.wait_seconds, 3) for rank in stats]
    figures = {"seconds_per_step": seconds, "peak_bytes": peaks, "waited_seconds": waits}
    return latent, not in_bands, figures


def _timed(sample: Callable[[int], torch.Tensor], steps: int) -> tuple[torch.Tensor, float]:
    """Return the sample after `steps` steps, and its seconds per step."""
    sample(REHEARSAL)
    started = time.perf_counter()
    latent = sample(steps).cpu()  # waits for a GPU that still computes
    return latent, round((time.perf_counter() - started) / steps, 4)


def decibels(sample: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of latents, with the range of `exact` as peak: 200 if they are equal, NaN if one
    has NaN."""
    sample, exact = sample.double().cpu(), exact.double().cpu()
    error = (sample - exact).square().mean().item()
    if error == 0:
        return 200.0
    return 10 * math.log10((exact.max() - exact.min()).item() ** 2 / error) if error == error else math.nan
