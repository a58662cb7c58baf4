"""The text on a sampler's node when its run has ended."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.reports.run_report import RunReport
from parallel_backend.wire.sampling import RunStats

from ..ui.node_text import say
from .run.gained import MeasuredRun
from .run.sampling_run import CallShape

if TYPE_CHECKING:
    from .call.diffusion_model import RemoteDiffusionModel


def report_run(
    stub: "RemoteDiffusionModel",
    model: RemoteTransformer | None,
    seconds: float,
    steps: int,
    calls: Mapping[CallShape, int],
    exact_calls: int | None = None,
    bands: int = 1,
    reason: str | None = None,
    stats: Sequence[RunStats] = (),
    expected_db: float | None = None,
) -> RunReport:
    """Tell the user about a run, and return its report. `model`: the model on ranks, if it is still there. `calls`: how many
    calls there were of each shape. Others: see RunReport."""
    run, setup = stub.run, stub.setup
    exact = sum(calls.values()) if exact_calls is None else exact_calls
    gained, advice = _gain_and_advice(stub, MeasuredRun(setup, stub.checkpoint, calls, exact, seconds, run.proof))
    cache = None if run.cache is None else run.cache.report()
    notes = (*(() if model is None else model.pool.notes), *run.lines, *advice)
    of_setup = notes, gained, setup.transfer_dtype
    report = RunReport(
        setup.degrees, bands, steps, seconds, exact_calls, reason, tuple(stats), cache, *of_setup, expected_db
    )
    took, *rest = report.shown
    say("\n".join((f"Parallel DiT: {took}", *rest)))
    return report


def tell_of_run(stub: "RemoteDiffusionModel") -> None:
    """Tell the user about a run outside of PipeFusion, from its first to its last model call. Apply PipeFusion has its own
    report."""
    run = stub.run
    assert run.began is not None
    report_run(stub, run.loaded(), run.ended - run.began, run.steps or run.calls.total(), run.calls)


def _gain_and_advice(stub: "RemoteDiffusionModel", run: MeasuredRun) -> tuple[str, tuple[str, ...]]:
    """Return (RunReport.gained of a run, lines of advice). There is at most one line, once for each MODEL. See MeasuredRun.

    Both are empty for a run with a step cache, because one GPU may have the cache too, and for a run that lost ranks.
    """
    if run.calibration is None or stub.run.cache is not None or stub.run.tries.count:
        return "", ()
    advice, stub.advised = "" if stub.advised else run.advice(), True  # every mode is predicted: not after each run
    return run.gained(), (advice,) if advice else ()
