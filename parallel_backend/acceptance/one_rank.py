"""Checks one rank against its class on the CPU, and its dtypes against each other. Other checks compare with it."""

import torch

from parallel_backend.client.proven_class import prompt_for_class
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import native_halves

from . import tiny_model
from .findings import Findings
from .session import OneRank, SelfTestSession

SAME_KERNELS, OTHER_KERNELS = 1e-5, 1e-3
"""The most relative difference by rounding in fp32: between runs of the same kernels, and between a GPU's and a CPU's. The
smallest change of an input moves the tiny model by more than the latter. Its fp32 output differs from fp64 by 3e-7."""
HALF = {"bf16": 5e-2, "fp16": 1e-2}
"""The most relative difference of a half precision from fp32."""
FP8 = 0.2
"""The most relative difference of weights in fp8 from weights in fp32."""
TIMES_ROUNDING = 2.0
"""A mode in half precision may be this many times as far from one rank as that one is from fp32: sums in another order."""
STEPS, BANDS = 3, 3


def run_arguments() -> tuple[torch.Tensor, torch.Tensor, Prompt]:
    """Noise, sigmas and prompt of the tiny model's runs."""
    x, _, tensors = tiny_model.call()
    return x, linear_sigmas(STEPS), prompt_for_class(Prompt(tensors, tensors, 1.0))


def rounding(one: OneRank, half: str) -> float:
    """The most relative difference of another rank's output in half precision from this one's."""
    return TIMES_ROUNDING * tiny_model.relative(one.calls[half], one.calls["fp32"])


def look_at_one_rank(session: SelfTestSession, findings: Findings) -> None:
    """Keeps the outputs in `session.one_rank`, for the other checks."""
    call = tiny_model.call()

    def output_in(dtype: str) -> torch.Tensor:
        output = session.load(Degrees(), dtype).predict(tiny_model.on_ranks(*call), session.poll)
        return tiny_model.as_one(output).float()

    expected, whole = tiny_model.reference(session.tiny_model, *call), output_in("fp32")
    limit = OTHER_KERNELS if session.settings.on_gpus else SAME_KERNELS
    findings.at_most("fp32 from the class on a CPU", tiny_model.relative(whole, expected), limit)
    model = session.load(Degrees(), "fp32")
    exact = tiny_model.as_one(sample_whole(model, *run_arguments(), session.poll))
    bands = tiny_model.as_one(sample_in_bands(model, *run_arguments(), BANDS, 1, session.poll)[0])
    calls = {"fp32": whole}
    for dtype, limit in HALF.items():
        if session.settings.on_gpus and dtype not in native_halves(session.settings.devices[0]):
            findings.leave_out(dtype, "this GPU does not compute in it, so that nothing is loaded in it by default")
            continue
        calls[dtype] = output_in(dtype)
        findings.at_most(f"{dtype} from fp32", tiny_model.relative(calls[dtype], whole), limit)
    if session.settings.on_gpus:
        stored = output_in("fp8_e4m3fn/fp32")
        findings.at_most("fp8 weights, computed in fp32, from fp32", tiny_model.relative(stored, whole), FP8)
    else:
        findings.leave_out("fp8 weights", "CPU ranks expand them to fp32 when they load them")
    session.one_rank = OneRank(calls, bands, exact)
