"""Trials of published models at their real widths, as a first load makes them without a shipped plan. Run by serve.py, for
benchmarks/speed/trial_seconds.py."""

import resource
import sys
import time
from functools import partial
from typing import Any

from boot import PACK, Results

sys.path.append(str(PACK / "scripts" / "plans"))
from make_plans import captured, own_calls
from published import PUBLISHED

from parallel_backend.own_class.trials.trial import trial


def main(results: Results, names: list[str]) -> None:
    for name in names:
        results.case(name, partial(tried, name))


def tried(name: str) -> dict[str, Any]:
    """Seconds of the clock and the CPU for all but tensor parallelism, what is not proven, and the peak of host memory."""
    model, call, _ = captured(name, PUBLISHED[name])
    own, times = model.model.diffusion_model.setup.own_class, own_calls.times_of(model.model.model_sampling)
    began, cpu = time.perf_counter(), time.process_time()
    proof = trial(own, call, times, bands=True)
    seconds, of_cpu = time.perf_counter() - began, time.process_time() - cpu
    lacks = {part: why for part in ("stages", "batch", "sequence", "bands") if (why := getattr(proof, part))}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": round(seconds, 1), "cpu_seconds": round(of_cpu, 1), "peak_gib": round(peak, 1), "not proven": lacks}
