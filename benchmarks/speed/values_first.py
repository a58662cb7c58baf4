"""Ulysses on two ranks with values first and with one transfer for queries, keys and values, over links of several speeds.

    python -m benchmarks.speed.values_first --rounds 7 --steps 4

The same ranks run both in turn: without overlap of transfers and computing a CPU rank's values travel with the others. The
links are the queue of harness/slow_link.py.
"""

import time
from collections.abc import Callable

import torch

from benchmarks.harness import measuring
from benchmarks.harness.linked_ranks import slow_pool
from benchmarks.harness.measuring import Outcome, TimedLog, figure, interleave, ratios
from benchmarks.harness.slow_link import FULL_SPEED
from benchmarks.harness.subjects import FLUX_LIKE, Subject
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import euler, linear_sigmas
from parallel_backend.core.degrees import Degrees
from testing.models import on_ranks

SPEEDS = (FULL_SPEED, 1e9, 5e8, 2e8, 1e8, 5e7)
"""Bytes a second of each direction."""
LATENCY = 1e-4
FIRST, TOGETHER = "values first", "together"


def run(subject: Subject, rounds: int, say: Callable[[str], None]) -> dict:
    rows = {}
    with subject.saved() as folder, slow_pool(2) as (pool, switch):
        model = on_ranks(pool, open_checkpoint(folder), Degrees(ulysses=2), "fp32", "auto", lambda: None)
        x, prompt = subject.problem()

        def case(overlap: bool) -> Outcome:
            def predict(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
                return model.predict(ModelCall(x, timestep, tensors), lambda: None, overlap=overlap)

            euler(predict, x, linear_sigmas(1), prompt)
            model.close_run(model.open_run(), lambda: None)
            started = time.perf_counter()
            sample = euler(predict, x, linear_sigmas(subject.steps), prompt)
            seconds = time.perf_counter() - started
            return Outcome(seconds, sample, stats=tuple(model.close_run(model.open_run(), lambda: None)))

        cases = {FIRST: lambda: case(True), TOGETHER: lambda: case(False)}
        for speed in SPEEDS:
            switch.set(speed, 0.0 if speed == FULL_SPEED else LATENCY)
            outcomes = interleave(cases, rounds, say)
            first, together = outcomes[FIRST], outcomes[TOGETHER]
            assert all(torch.equal(outcome.sample, first[0].sample) for outcome in first + together)
            name = "full speed" if speed == FULL_SPEED else f"{speed / 1e6:g} MB/s"
            rows[name] = {each: measuring.row(outcomes[each], subject.steps) for each in cases}
            rows[name]["time of values first over together"] = figure(ratios(first, together))
            say(f"{name}: {rows[name]['time of values first over together']}")
    return measuring.head("values_first", subject, rounds) | {"latency": LATENCY, "links": rows}


def main() -> None:
    given = measuring.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    measuring.report(run(FLUX_LIKE.at(steps=given.steps), given.rounds, TimedLog()), given.out)


if __name__ == "__main__":
    main()
