"""Seconds until two ranks compute with another strength of a LoRA, against loading the model again.

    python -m benchmarks.speed.lora --rounds 5 --out benchmarks/results/lora_NAME_DATE.json

Loading is `load_model` on ranks that run already, its file in the page cache: what merging the LoRA into the weights would
at least take. Every case ends with the ranks' word; no step is computed.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import measuring
from benchmarks.harness.measuring import Outcome, Outcomes
from benchmarks.harness.subjects import DEEPEST_FLUX_LIKE, Subject
from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.lora import Delta
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing.models import on_ranks

SUBJECT = replace(DEEPEST_FLUX_LIKE, config=DEEPEST_FLUX_LIKE.config | {"num_attention_heads": 11})
RANK = 16
MODES = {"pipefusion 2": Degrees(pipe=2), "tensor 2": Degrees(tensor=2)}


def lora(checkpoint: Checkpoint) -> list[Delta]:
    """Factors in bf16, as LoRA files have them, for every matrix."""
    return [
        Delta(key, *(torch.randn(*size).bfloat16() for size in ((shape[0], RANK), (RANK, shape[1]))), 0.1)
        for key, shape in checkpoint.original_shapes.items()
        if len(shape) == 2
    ]


def measure(subject: Subject, folder: Path, rounds: int) -> tuple[Outcomes, dict]:
    """The outcomes, and how large the LoRA is: bytes of its factors, and on the ranks."""
    pool, checkpoint = Pool(("cpu", "cpu"), threads=1), subject.opened(folder)
    pool.ready.result()
    models: dict[str, RemoteTransformer] = {}
    factors, others = lora(checkpoint), lora(checkpoint)
    strengths = itertools.count(1)

    def timed(work: Callable[[], None]) -> Outcome:
        started = time.perf_counter()
        work()
        return Outcome(time.perf_counter() - started, torch.empty(0))

    def load(mode: str) -> None:
        models[mode] = on_ranks(pool, checkpoint, MODES[mode], "fp32", "sdpa", lambda: None)

    def adapt(mode: str) -> None:
        models[mode].adapt("a LoRA", factors, lambda: None)

    def change(mode: str) -> None:
        strength = 0.1 * next(strengths)
        models[mode].adapt(strength, [replace(delta, scale=strength) for delta in factors], lambda: None)

    def another(mode: str) -> None:
        models[mode].adapt("another", others, lambda: None)

    def remove(mode: str) -> None:
        models[mode].adapt(None, (), lambda: None)

    steps = {
        "load": load,
        "first LoRA": adapt,
        "strength changed": change,
        "another LoRA": another,
        "removed": remove,
    }
    cases = {
        f"{mode}, {name}": lambda mode=mode, step=step: timed(lambda: step(mode))
        for mode in MODES
        for name, step in steps.items()
    }
    try:
        outcomes = measuring.interleave(cases, rounds, measuring.TimedLog())
        adapt(list(MODES)[-1])
        adapter_bytes = models[list(MODES)[-1]].adapter_bytes
    finally:
        pool.close()
    sent = sum(delta.up.nbytes + delta.down.nbytes for delta in factors)
    return outcomes, {"file_bytes": folder.stat().st_size, "factor_bytes": sent, "bytes_on_ranks_tensor_2": adapter_bytes}


def summary(subject: Subject, rounds: int, outcomes: Outcomes, sizes: dict) -> dict:
    def share(mode: str, name: str) -> float:
        shares = measuring.ratios(outcomes[f"{mode}, {name}"], outcomes[f"{mode}, load"])
        return measuring.figure(shares, 4)["median"]

    scope = "until the ranks say that all is in place; no step is computed, the file is in the page cache"
    head = measuring.head("lora", subject, rounds, scope)
    head.pop("steps")
    return {
        **head,
        "lora": f"of rank {RANK}, on all matrices",
        "sizes": sizes,
        "median_seconds": {case: measuring.median(runs, 4) for case, runs in outcomes.items()},
        "spread_seconds": {case: measuring.spread(runs, 4) for case, runs in outcomes.items()},
        "share_of_load": {
            f"{mode}, {name}": share(mode, name)
            for mode in MODES
            for name in ("first LoRA", "strength changed", "another LoRA")
        },
    }


def main() -> None:
    options = measuring.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    with SUBJECT.saved() as folder:
        outcomes, sizes = measure(SUBJECT, folder, options.rounds)
    measuring.report(summary(SUBJECT, options.rounds, outcomes, sizes), options.out)


if __name__ == "__main__":
    main()
