"""Two ranks whose devices hold a quarter of the file each: seconds against devices that hold all, and what was predicted.

    python -m benchmarks.speed.offload --gigabytes 2 --budget 0.5 --rounds 3 --out benchmarks/results/offload_NAME_DATE.json

Devices are emulated (testing/emulated_device.py): their memory is a budget for weights, and copies from host memory have a
rate. Compute is this machine's, so the rate is scaled to it: copying the whole file takes as many times a model call's
compute as all of Flux-dev (bf16) over PCIe 4 takes of an RTX 4090's for 1024 x 1024 pixels, by presets.py. What the
emulation cannot have beside compute is the copying itself: the thread that stands in for the device's copy engine takes time
of the cores that compute.

Predicted: in each micro-step the longer of compute and copies, and at most their sum. Compute is that of the run with all
weights on the devices, and the bytes are those that were copied. `block_by_block` simulates it: blocks compute
alike, as Flux's do, and are of their own sizes.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import measuring
from benchmarks.harness.measuring import Outcome
from benchmarks.harness.subjects import Subject
from benchmarks.predictions.presets import BF16, HARDWARE, MODELS
from benchmarks.speed.loading import large
from parallel_backend.core.block_residency import SLOTS
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.balance import even_stages
from parallel_backend.placement.memory_check import MemoryCheck
from parallel_backend.placement.model_sizes import RankWeights
from parallel_backend.planning.known_gpus import PCIE_4
from parallel_backend.processes.local import LocalRanks, Ranks
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.lifecycle import Unload, Unloaded
from parallel_backend.wire.rank_settings import StartSettings
from testing import mini
from testing.emulated_device import EmulatedDevice, start_with
from testing.models import on_ranks

MODES = {
    "ulysses": (Degrees(ulysses=2), 0),
    "tensor": (Degrees(tensor=2), 0),
    "pipefusion M=2": (Degrees(pipe=2), 2),
    "pipefusion M=4": (Degrees(pipe=2), 4),
}
"""Degrees, and bands."""
STEPS, TEXT = 3, 64
TOKENS = 64 * 64 + 512
"""Of Flux at 1024 x 1024 pixels, with its text."""


ROUNDS = 4
"""Micro-steps until a micro-step takes as long as the one before it: copies are at most SLOTS blocks ahead."""


def streamed_seconds(compute: Sequence[float], copies: Sequence[float], gap: float = 0.0) -> float:
    """Seconds from a micro-step's first block to the end of its last block, if micro-steps follow one another.

    `compute`: seconds of a rank's blocks, in their order. `copies`: seconds of each block's copy to the device; 0 for a
    block that stays there. `gap`: seconds between two micro-steps, in which copies go on.

    Blocks are copied one after the other. A copy begins when a slot is free: after the block that is SLOTS before it among
    the streamed ones. So a micro-step takes about max(sum of compute, sum of copies), by groups of blocks.
    """
    if not any(copies):
        return sum(compute)
    now = copied = began = 0.0
    slots = [0.0] * SLOTS  # when each was last computed with, in the order of use
    for _ in range(ROUNDS):
        began = now
        for computing, copying in zip(compute, copies, strict=True):
            if copying:
                copied = max(copied, slots.pop(0)) + copying
                now = max(now, copied)
            now += computing
            if copying:
                slots.append(now)
        now += gap
    return now - gap - began


def copies_over_compute() -> float:
    """Of Flux-dev on one RTX 4090: seconds in which all of its weights cross PCIe 4 over those of a model call."""
    model, card = MODELS["flux-dev"], HARDWARE["RTX 4090"]
    return BF16 * (model.weights + model.others) / PCIE_4 / (model.layers * model.block(card).whole(TOKENS))


@dataclass(frozen=True)
class Run:
    """One mode's run. `calls`: (exact ones, those in bands)."""

    outcome: Outcome
    calls: tuple[int, int]
    bands: int

    @property
    def compute(self) -> list[float]:
        """By rank, seconds of a whole call."""
        return [rank.compute_seconds / sum(self.calls) for rank in self.outcome.stats]

    def micro_steps(self, pipe: int) -> int:
        """Those one after another, on whichever ranks: an exact call goes through the stages in turn."""
        exact, banded = self.calls
        return exact * pipe + banded * max(1, self.bands)


def predicted(resident: Run, streamed: Run, rate: float, pipe: int) -> tuple[float, float]:
    """(seconds if copies hide behind compute as far as they fit, seconds if they do not)."""
    exact, banded = resident.calls
    copies = [rank.streamed_bytes / rank.micro_steps / rate for rank in streamed.outcome.stats]
    longer = [max(0.0, copy - compute) for copy, compute in zip(copies, resident.compute, strict=True)]
    in_bands = [
        max(0.0, copy - compute / max(1, resident.bands)) for copy, compute in zip(copies, resident.compute, strict=True)
    ]
    seconds = resident.outcome.seconds
    least = seconds + exact * (sum(longer) if pipe > 1 else max(longer)) + banded * max(1, resident.bands) * max(in_bands)
    return least, seconds + resident.micro_steps(pipe) * max(copies)


def block_by_block(
    seconds: float, calls: tuple[int, int], bands: int, weights: Sequence[RankWeights], budget: int, rate: float, pipe: int
) -> float:
    """Seconds of a run that takes `seconds` with all weights on the devices, whose stages compute equally long."""
    (exact, banded), bands = calls, max(1, bands)
    call = seconds / (exact * pipe + banded)

    def later(compute: float) -> list[float]:
        found = []
        for rank in weights:
            streamed, count = rank.streamed_blocks(budget), len(rank.blocks)
            copies = [size / rate if index in streamed else 0.0 for index, size in enumerate(rank.blocks)]
            found.append(streamed_seconds([compute / count] * count, copies) - compute)
        return found

    return seconds + exact * (sum if pipe > 1 else max)(later(call)) + banded * bands * max(later(call / bands))


def weights_of(path: Path, subject: Subject, mode: str) -> list[RankWeights]:
    degrees = MODES[mode][0]
    checkpoint = subject.opened(path, degrees.tensor)
    stages = even_stages(checkpoint.built.total, degrees.pipe)
    setup = mini.setup(path, "fp32", ("cpu",) * degrees.world, degrees, "auto")
    return MemoryCheck(checkpoint, setup, stages, 1).weights()


@contextmanager
def weights_alone(budget: int) -> Iterator[None]:
    """Within it clients give their ranks this budget for weights, and reckon with no memory for what a run takes."""
    free = {"check": lambda *_: None, "check_weights": lambda *_: None, "placed": lambda *_, **__: (budget, budget)}
    with mock.patch.multiple(MemoryCheck, **free):
        yield


def sample(pool: Pool, path: Path, subject: Subject, mode: str) -> Run:
    degrees, bands = MODES[mode]
    model = on_ranks(pool, subject.opened(path), degrees, "fp32", "sdpa", lambda: None)
    outcome = measuring.run_ranks(model, subject, bands=bands)
    pool.ask(Unload(), Unloaded).result(timeout=120)
    return Run(outcome, (1, subject.steps - 1) if bands else (subject.steps, 0), bands)


def run(
    subject: Subject,
    budget: int,
    rounds: int,
    say: Callable[[str], None],
    start: Callable[[StartSettings], Ranks] = LocalRanks,
    start_on: Callable[[EmulatedDevice], Callable[[StartSettings], Ranks]] = start_with,
) -> dict[str, Any]:
    """Interleaved rounds of all modes, on devices that hold all and on devices of `budget` bytes."""
    found: dict[str, list[tuple[Run, Run]]] = {mode: [] for mode in MODES}
    two = ("cpu", "cpu")
    with subject.saved() as path, closing(Pool(two, threads=1, start=start)) as plain:
        size = path.stat().st_size
        compute = sum(sample(plain, path, subject, "ulysses").compute)  # of both halves
        rate = size / (compute * copies_over_compute())
        say(f"a call computes {compute:.2f} s on one core; copies: {rate / 1e9:.3f} GB/s")
        with closing(Pool(two, threads=1, start=start_on(EmulatedDevice(budget, rate)))) as emulated:
            for turn in range(rounds):
                for mode, runs in found.items():
                    whole = sample(plain, path, subject, mode)
                    with weights_alone(budget):
                        runs.append((whole, sample(emulated, path, subject, mode)))
                    seconds = [each.outcome.seconds for each in runs[-1]]
                    say(f"round {turn + 1}/{rounds}  {mode:16} all there {seconds[0]:.2f} s, streamed {seconds[1]:.2f} s")
        weights = {mode: weights_of(path, subject, mode) for mode in MODES}
    modes = {mode: row(runs, rate, budget, MODES[mode][0].pipe, weights[mode]) for mode, runs in found.items()}
    return {
        "file_MB": round(size / 1e6, 1),
        "budget_MB": round(budget / 1e6, 1),
        "copies_GB_per_s": round(rate / 1e9, 4),
        "copying_the_file_over_a_call's_compute": round(copies_over_compute(), 3),
        "best": min(modes, key=lambda mode: modes[mode]["seconds"]["median"]),
        "modes": modes,
    }


def row(runs: list[tuple[Run, Run]], rate: float, budget: int, pipe: int, weights: Sequence[RankWeights]) -> dict[str, Any]:
    resident, streamed = ([each.outcome for each in side] for side in zip(*runs, strict=True))
    foretold = [predicted(*pair, rate, pipe) for pair in runs]
    slowdowns = [after / before for after, before in zip(*map(measuring.seconds, (streamed, resident)), strict=True)]
    over = [after.seconds / least for after, (least, _) in zip(streamed, foretold, strict=True)]
    stats, steps = streamed[0].stats, sum(runs[0][1].calls)
    simulated = block_by_block(
        statistics.median(measuring.seconds(resident)), runs[0][0].calls, runs[0][0].bands, weights, budget, rate, pipe
    )
    return {
        "equal": all(torch.equal(after.sample, before.sample) for after, before in zip(streamed, resident, strict=True)),
        "peak_MB": [round(max(each.stats[rank].peak_bytes for each in streamed) / 1e6, 1) for rank in range(len(stats))],
        "within_budget": all(rank.peak_bytes <= budget for each in streamed for rank in each.stats),
        "MB_per_step_by_rank": [round(rank.streamed_bytes / steps / 1e6, 1) for rank in stats],
        "waited_seconds_by_rank": [round(rank.streaming_wait_seconds, 2) for rank in stats],
        "seconds_all_there": measuring.figure(measuring.seconds(resident)),
        "seconds": measuring.figure(measuring.seconds(streamed)),
        "predicted": round(statistics.median(least for least, _ in foretold), 3),
        "predicted_most": round(statistics.median(most for _, most in foretold), 3),
        "predicted_block_by_block": round(simulated, 3),
        "slowdown": measuring.figure(slowdowns),
        "over_predicted": measuring.figure(over),
        "over_block_by_block": round(statistics.median(measuring.seconds(streamed)) / simulated, 3),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gigabytes", type=float, default=2.0)
    options.add_argument("--budget", type=float, default=0.5, help="GB of weights on each device")
    options.add_argument("--side", type=int, default=36, help="latent pixels of the picture")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    subject = replace(large(given.gigabytes), side=given.side, text=TEXT, steps=STEPS)
    began = time.perf_counter()
    result = run(subject, round(given.budget * 1e9), given.rounds, measuring.TimedLog())
    head = {
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "model": str(subject),
        "rounds": given.rounds,
        "steps": subject.steps,
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }
    measuring.report(head | result, given.out)


if __name__ == "__main__":
    main()
