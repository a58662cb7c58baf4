"""Checks one rank against the tiny model's class on a CPU, and every mode on all devices against one rank."""

import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.proven_class import prompt_for_class, tensors_of
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import native_halves
from parallel_backend.core.validate import all_degrees
from parallel_backend.own_class.calls.patching import Latents

from . import tiny_model
from .session import Findings, SelfTestSession

SAME_KERNELS, OTHER_KERNELS = 1e-5, 1e-3
"""Largest allowed relative difference by rounding in fp32: between runs of the same kernels, and between a GPU's and a
CPU's. The smallest change of an input moves the tiny model by more than the latter. Its fp32 output differs from fp64 by
3e-7."""
HALF = {"bf16": 5e-2, "fp16": 1e-2}
"""Maximum relative difference of a half precision from fp32."""
FP8 = 0.2
"""Maximum relative difference of weights in fp8 from weights in fp32."""
TIMES_ROUNDING = 2.0
"""A mode in half precision may be this many times as far from one rank as that one is from fp32: sums in another order."""
STALE = 0.1
"""Maximum relative difference of the tiny model's displaced run from the exact run."""
STEPS, BANDS = 3, 3


def look_at_modes(session: SelfTestSession, findings: Findings) -> None:
    """A model call in fp32 in each mode; in half precision with sums over ranks; and runs with keys of a step ago."""
    one = _one_rank(session, findings)
    if session.world == 1:
        findings.leave_out("modes", "there is one rank; name more devices, or one device several times")
        return
    model = session.load(Degrees(), "fp32")
    exact = sample_whole(model, *_run_arguments(), session.poll)
    bands = sample_in_bands(model, *_run_arguments(), BANDS, 1, session.poll)[0]
    half = session.settings.half
    tries = [(degrees, "fp32", SAME_KERNELS) for degrees in modes_of(session.world)]
    if half is None:
        findings.leave_out("half precision", "these GPUs compute in none")
    else:
        rounding = TIMES_ROUNDING * tiny_model.relative(one[half], one["fp32"])
        tries.append((Degrees(tensor=session.world), half, rounding))
    for degrees, dtype, limit in tries:
        with findings.of(f"{degrees}, {dtype}"):
            model = session.load(degrees, dtype)
            error = max(tiny_model.relative(_output(session, model), one[dtype]) for _ in range(2))
            findings.at_most(f"{degrees}, {dtype}", error, limit)
            if degrees.displaced:
                _look_at_run(session, findings, model, degrees, 1, exact, STALE)
            elif degrees.pipe == session.world:
                _look_at_run(session, findings, model, degrees, BANDS, bands, SAME_KERNELS)


def modes_of(world: int) -> list[Degrees]:
    """Return the modes of `world` ranks, and one product of two: a pipeline whose stages exchange heads, so that transfers
    of several communicators are in progress at once. Other products make no other transfers."""
    modes = [degrees for degrees in all_degrees(world) if max(degrees.sizes) == world]
    stages = next((stages for stages in range(2, world) if world % stages == 0), None)
    return modes if stages is None else [*modes, Degrees(pipe=stages, ulysses=world // stages)]


def _one_rank(session: SelfTestSession, findings: Findings) -> dict[str, torch.Tensor]:
    """Run the call on one rank. Returns its output by dtype. Compares fp32 to the class on the CPU, halves and fp8 to
    fp32."""
    on_gpus = session.settings.on_gpus

    def output_in(dtype: str) -> torch.Tensor:
        return _output(session, session.load(Degrees(), dtype))

    outputs = {"fp32": output_in("fp32")}
    x, timestep, tensors = tiny_model.call()
    with torch.inference_mode():
        expected = session.tiny_model(x, timestep, **tensors)
    error = tiny_model.relative(outputs["fp32"], expected)
    findings.at_most("one rank in fp32 from the class on a CPU", error, OTHER_KERNELS if on_gpus else SAME_KERNELS)
    for dtype, limit in HALF.items():
        if on_gpus and dtype not in native_halves(session.settings.devices[0]):
            findings.leave_out(dtype, "this GPU does not compute in it, so that nothing is loaded in it by default")
            continue
        outputs[dtype] = output_in(dtype)
        findings.at_most(f"one rank in {dtype} from fp32", tiny_model.relative(outputs[dtype], outputs["fp32"]), limit)
    if on_gpus:
        error = tiny_model.relative(output_in("fp8_e4m3fn/fp32"), outputs["fp32"])
        findings.at_most("one rank with fp8 weights, computed in fp32, from fp32", error, FP8)
    return outputs


def _look_at_run(
    session: SelfTestSession,
    findings: Findings,
    model: RemoteTransformer,
    degrees: Degrees,
    bands: int,
    expected: torch.Tensor | Latents,
    limit: float,
) -> None:
    """Check that transfers during computation give the same bits as transfers that are waited for at once."""
    run = model, *_run_arguments(), bands, 1, session.poll
    beside, apart = (tiny_model.as_one(sample_in_bands(*run, overlap=overlap)[0]) for overlap in (True, False))
    findings.expect(torch.equal(beside, apart), f"{degrees}: transfers that overlap with computation change the result")
    findings.at_most(f"{degrees}, a run", tiny_model.relative(beside, expected), limit)


def _output(session: SelfTestSession, model: RemoteTransformer) -> torch.Tensor:
    x, timestep, tensors = tiny_model.call()
    return tiny_model.as_one(model.predict(ModelCall(x, timestep, tensors_of(tensors)), session.poll)).float()


def _run_arguments() -> tuple[torch.Tensor, torch.Tensor, Prompt]:
    """Return noise, sigmas and prompt for the tiny model's runs."""
    x, _, tensors = tiny_model.call()
    return x, linear_sigmas(STEPS), prompt_for_class(Prompt(tensors, tensors, 1.0))
