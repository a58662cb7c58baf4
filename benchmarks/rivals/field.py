"""The field's own case at every degree: Flux-schnell at 1024 x 1024 pixels and 4 steps.

Random weights in the real shapes. On CUDA devices whole, one device a rank; on a CPU in a reduction that the result's
"model" states, on processes that share the cores, so that CPU seconds by rank say more than the clock.
"""

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import measuring
from benchmarks.harness.measuring import Outcome, figure, ratios
from benchmarks.harness.pools import Pools
from benchmarks.harness.subjects import FLUX_SCHNELL, Subject
from benchmarks.speed.two_ranks import EXACT, Mode
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.models import on_ranks

SUBJECTS = {"field-flux": FLUX_SCHNELL}
ON_CPU = {
    "field-flux": {"layers": 8, "side": 64, "steps": 4, "heads": 8},
}
"""What a CPU gets of them unless it is told otherwise: a few minutes each, and eight whole copies fit 16 GB."""

MOST_BANDS = 8

ONE = "one rank"


def degrees(guided: bool) -> dict[str, Mode]:
    """One, two, four and eight ranks, alone and in the products in use. PipeFusion has two patches a stage, 8 at most."""
    made = {ONE: Mode(Degrees())}
    for count in (2, 4, 8):
        made |= {
            f"pipefusion {count}": Mode(Degrees(pipe=count), bands=min(MOST_BANDS, 2 * count)),
            f"ulysses {count}": Mode(Degrees(ulysses=count)),
        }
    made |= {
        "tensor 2": Mode(Degrees(tensor=2)),
        "ring 2": Mode(Degrees(ring=2)),
        "pipefusion 2 x ulysses 2": Mode(Degrees(pipe=2, ulysses=2), bands=4),
        "pipefusion 4 x ulysses 2": Mode(Degrees(pipe=4, ulysses=2), bands=8),
    }
    if guided:
        made |= {
            "split batch 2": Mode(Degrees(batch=2)),
            "split batch 2 x pipefusion 2": Mode(Degrees(batch=2, pipe=2), bands=4),
            "split batch 2 x pipefusion 4": Mode(Degrees(batch=2, pipe=4), bands=8),
        }
    return dict(sorted(made.items(), key=lambda item: item[1].degrees.world))


def row(outcomes: dict[str, list[Outcome]], name: str, mode: Mode, steps: int) -> dict:
    said = {"ranks": mode.degrees.world} | measuring.row(outcomes[name], steps)
    said["seconds_per_step"] = round(said["seconds"]["median"] / steps, 4)
    if name != ONE and ONE in outcomes:
        difference = mini.relative(outcomes[name][0].sample, outcomes[ONE][0].sample)
        said |= {
            "speed_up": figure(ratios(outcomes[ONE], outcomes[name])),
            "relative_difference": float(f"{difference:.2g}"),
            "exact": difference < EXACT,
        }
    return said


def run(
    part: str,
    rounds: int,
    say: Callable[[str], None],
    device: str = "cpu",
    layers: int | None = None,
    side: int | None = None,
    steps: int | None = None,
    heads: int | None = None,
    only: list[str] | None = None,
    subject: Subject | None = None,
    pools: Callable[[int], Pool] | None = None,
) -> dict:
    """The result. `device`: cpu or cuda; degrees for which there are too few CUDA devices are left out with a word."""
    asked = {"layers": layers, "side": side, "steps": steps, "heads": heads}
    given = {name: value for name, value in asked.items() if value}
    cpu = device == "cpu"
    whole = subject or replace(SUBJECTS[part], dtype="fp32" if cpu else "bf16")
    own = whole.at(**(ON_CPU[part] if cpu and subject is None else {}) | given)
    available = 8 if cpu else torch.cuda.device_count()
    modes = {name: mode for name, mode in degrees(own.cfg > 1).items() if only is None or name in only}
    left_out = {
        name: f"needs {mode.degrees.world} devices" for name, mode in modes.items() if mode.degrees.world > available
    }
    for name, why in left_out.items():
        say(f"left out: {name}: {why}, there are {available}")
    with TemporaryDirectory() as directory, ExitStack() as stack:
        say(f"writing the weights of: {own}")
        checkpoint = own.opened(own.save(Path(directory)))
        pools = pools or stack.enter_context(Pools(device, kept=0))

        def once(mode: Mode) -> Outcome:
            model = on_ranks(pools(mode.degrees.world), checkpoint, mode.degrees, own.dtype, "auto", lambda: None)
            return measuring.run_ranks(model, own, bands=mode.bands)

        cases = {name: functools.partial(once, mode) for name, mode in modes.items() if name not in left_out}
        outcomes = measuring.interleave(cases, rounds, say)
    devices = ("cpu",) if cpu else tuple(f"cuda:{index}" for index in range(available))
    return measuring.head(part.replace("-", "_"), own, rounds, devices=devices) | {
        "cores": os.cpu_count() if cpu else None,
        "left_out": left_out,
        "cases": {name: row(outcomes, name, modes[name], own.steps) for name in outcomes},
    }
