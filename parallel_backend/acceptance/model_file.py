"""Checks with the user's model: the host itself, one rank and all ranks sample the same noise with it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_checkpoint
from parallel_backend.checkpoints.own_class import open_own_class
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import resolve_dtype
from parallel_backend.families.base.patching import Latents, latents_of
from parallel_backend.families.others import UnknownModel
from parallel_backend.families.own_class.example import one_entry, with_example
from parallel_backend.families.own_class.family import OwnClassFamily, own_class_family
from parallel_backend.families.own_class.proof import Proof
from parallel_backend.families.own_class.trial import trial
from parallel_backend.wire.sampling import RunStats

from . import tiny_model
from .findings import Findings, NotLookedAt
from .session import OwnModel, SelfTestSession

TOKENS = {True: 4096, False: 256}
"""Image tokens on GPUs (True), and on CPU ranks."""
TEXT_TOKENS = 64
FRAMES = 4
"""Tokens along a video's time axis."""
REHEARSAL = 2
"""Steps before the timed ones: a whole call and one in bands."""
CLOSE = {True: 35.0, False: 20.0}
"""The least decibels from the first run, for exact modes (True) and for bands: relative differences of about 0.15 and 0.8.
bf16 rounds, and with random conditioning bands differ more than with a picture's."""


@dataclass(frozen=True)
class Problem:
    """The inputs of all runs. `tensors`: random conditioning of the right shapes, as there is no text encoder."""

    noise: torch.Tensor | Latents
    tensors: dict[str, torch.Tensor]
    steps: int
    timestep: float = 1.0
    """The model's at sigma 1."""

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.tensors, self.tensors, 1.0, self.timestep)


def problem_of(checkpoint: Checkpoint, tokens: int, steps: int) -> Problem:
    """One square picture of about `tokens` tokens; a video has FRAMES frames with as many tokens together."""
    family, config = checkpoint.family, checkpoint.config
    video, most = family.patching.video, family.sizes.max_side(config)
    side = max(2, round(math.sqrt(tokens / (FRAMES if video else 1))))
    side = min(side, most or side)
    sizes = family.patching.whole((FRAMES, side, side) if video else (side, side))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise = family.patching.alongside(torch.randn(1, family.sizes.latent_channels(config), *sizes))
        return Problem(noise, family.inputs.example(config, TEXT_TOKENS), steps)


def tried(session: SelfTestSession, model: OwnModel, path: Path) -> tuple[Checkpoint, Proof]:
    """The checkpoint of a class, with its call as the family's example, and what a trial shows for all of the devices."""
    call, world = one_entry(model.call), session.world
    proof = trial(model.own, call, model.times, lambda _share: session.poll(), world > 1, world > 1, world)
    own = replace(model.own, blocks=proof.blocks, latent=proof.latent)
    checkpoint = open_own_class(path, own)
    family = replace(with_example(own_class_family(own), call), file=checkpoint.family.file)
    return replace(checkpoint, family=family), proof


def problem_of_class(checkpoint: Checkpoint, model: OwnModel, steps: int) -> Problem:
    """The call that the class was tried for, of its own size, with other noise."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        latents = checkpoint.family.noise((1, *model.call.latents[0].shape[1:]))
    noise = latents[0] if len(latents) == 1 else latents
    return Problem(noise, checkpoint.family.example(checkpoint.config, 0), steps, model.times[0])


def modes_of(world: int) -> list[Degrees]:
    """One rank, then the modes of all ranks for one picture: exact modes first."""
    several = [Degrees(ulysses=world), Degrees(ring=world), Degrees(tensor=world), Degrees(pipe=world)]
    return [Degrees(), *(several if world > 1 else [])]


def look_at_model_file(session: SelfTestSession, findings: Findings) -> None:
    settings = session.settings
    if settings.model is None:
        raise NotLookedAt("no model was named")
    proof: Proof | None = None
    if settings.own is None:
        try:
            checkpoint = open_checkpoint(settings.model)
        except UnknownModel as why:
            raise NotLookedAt("ComfyUI's class computes it: give its MODEL to the node Parallel Self-Test") from why
        problem = problem_of(checkpoint, settings.tokens or TOKENS[settings.on_gpus], settings.steps)
    else:
        checkpoint, proof = tried(session, settings.own, settings.model)
        problem = problem_of_class(checkpoint, settings.own, settings.steps)
    dtype = resolve_dtype("default", checkpoint.dtype, settings.devices, checkpoint.family.half_dtypes(checkpoint.config))
    findings.note("file", checkpoint.path.name)
    findings.note("family", checkpoint.family.name)
    findings.note("weight_dtype", dtype)
    findings.note("latent", list(latents_of(problem.noise)[0].shape))
    findings.note("steps", problem.steps)
    findings.note("runs", [])
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
        findings.figures["runs"].append(run)

    try:
        session.end_ranks()
        note(f"{session.host.name}, no ranks", *_native(session, checkpoint, problem))
    except NotLookedAt as why:
        findings.leave_out("the same model without ranks", str(why))
    for degrees in modes_of(session.world):
        with findings.of(str(degrees)):  # which is left out where the model cannot be cut so, or does not fit
            if proof is not None:
                proof.check(degrees, checkpoint.path.name)
            note(str(degrees), *_on_ranks(session, checkpoint, degrees, dtype, problem))


def _native(session: SelfTestSession, checkpoint: Checkpoint, problem: Problem) -> tuple[torch.Tensor, bool, dict[str, Any]]:
    if session.host.native is None:
        raise NotLookedAt("only the node Parallel Self-Test can load it into ComfyUI")
    noise = problem.noise
    with session.host.native(checkpoint, problem.tensors) as predict:
        assert isinstance(noise, torch.Tensor)

        def watched(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            session.poll()
            return predict(x, timestep, tensors)

        def sample(steps: int) -> torch.Tensor:
            return euler(watched, noise, linear_sigmas(steps), problem.prompt)

        latent, seconds = _timed(sample, problem.steps)
    return latent, True, {"seconds_per_step": seconds}


def _on_ranks(
    session: SelfTestSession, checkpoint: Checkpoint, degrees: Degrees, dtype: str, problem: Problem
) -> tuple[torch.Tensor, bool, dict[str, Any]]:
    started = time.perf_counter()
    session.ranks(degrees.world)
    loading = time.perf_counter()
    family = checkpoint.family
    own = family.own if isinstance(family, OwnClassFamily) else None
    model = session.load(degrees, dtype, checkpoint.path, own=own)
    in_bands = degrees.pipe > 1 and (own is None or own.latent is not None)
    loaded = time.perf_counter()
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
    figures = {
        "start_seconds": round(loading - started, 2),
        "load_seconds": round(loaded - loading, 2),
        "seconds_per_step": seconds,
        "weight_bytes": list(model.weight_bytes),
        "peak_bytes": [rank.peak_bytes for rank in stats],
        "waited_seconds": [round(rank.wait_seconds, 3) for rank in stats],
        "sent_bytes": [sum(rank.bytes_sent.values()) for rank in stats],
    }
    return latent, not in_bands, figures


def _timed(sample: Callable[[int], torch.Tensor], steps: int) -> tuple[torch.Tensor, float]:
    """The sample of `steps` steps, and its seconds for a step."""
    sample(REHEARSAL)
    started = time.perf_counter()
    latent = sample(steps).cpu()  # waits for a GPU that still computes
    return latent, round((time.perf_counter() - started) / steps, 4)


def decibels(sample: torch.Tensor, exact: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of latents; the peak is the span of `exact`. 200 if they are equal, NaN if one has NaN."""
    sample, exact = sample.double().cpu(), exact.double().cpu()
    error = (sample - exact).square().mean().item()
    if error == 0:
        return 200.0
    return 10 * math.log10((exact.max() - exact.min()).item() ** 2 / error) if error == error else math.nan
