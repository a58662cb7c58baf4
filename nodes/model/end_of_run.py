"""The text on a sampler's node when its run has ended."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from parallel_backend.client.reports.run_report import RunReport

from ..ui.node_text import say
from .run.gained import MeasuredRun
from .run.sampling_run import CallShape

if TYPE_CHECKING:
    from .call.diffusion_model import RemoteDiffusionModel


def gain_and_advice(
    stub: "RemoteDiffusionModel", calls: Mapping[CallShape, int], exact_calls: int, seconds: float
) -> tuple[str, tuple[str, ...]]:
    """Return (RunReport.gained of a run, lines of advice). There is at most one line, once for each MODEL. See MeasuredRun.

    Both are empty for a run with a step cache, because one GPU may have the cache too, and for a run that lost ranks.
    """
    if stub.run.cache is not None or stub.run.tries.count:
        return "", ()
    run = MeasuredRun(stub.setup, stub.checkpoint, calls, exact_calls, seconds, stub.run.proof)
    if run.calibration is None:
        return "", ()
    advice, stub.advised = "" if stub.advised else run.advice(), True  # every mode is predicted: not after each run
    return run.gained(), (advice,) if advice else ()


def tell_of_run(stub: "RemoteDiffusionModel") -> None:
    """Tell the user about a run outside of PipeFusion, from its first to its last model call. Apply PipeFusion has its own
    report."""
    run, setup = stub.run, stub.setup
    assert run.began is not None
    seconds, steps, model = run.ended - run.began, run.steps or run.calls.total(), run.loaded()
    gained, advice = gain_and_advice(stub, run.calls, run.calls.total(), seconds)
    cache = None if run.cache is None else run.cache.report()
    notes = (*(() if model is None else model.pool.notes), *run.lines, *advice)
    report = RunReport(setup.degrees, 1, steps, seconds, None, None, (), cache, notes, gained, setup.transfer_dtype)
    say_report(report)


def say_report(report: RunReport) -> None:
    took, *rest = report.shown
    say("\n".join((f"Parallel DiT: {took}", *rest)))
