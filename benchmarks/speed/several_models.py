"""Seconds until one of two models computes that take turns on two ranks whose devices hold one of them.

    python -m benchmarks.speed.several_models --rounds 5 --out benchmarks/results/several_models_NAME_DATE.json

Devices are emulated (testing/emulated_device.py): a budget for weights, and a rate for copies from host memory, at which a
rank's weights take COPY_SECONDS. A turn's switch is what its first call takes longer than those behind it. Beside it: the
seconds that the bytes which came to the devices take at that rate, and those of reading the model again from its file, which
is in the page cache.
"""

import contextlib
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import measuring
from benchmarks.harness.subjects import DEEPEST_FLUX_LIKE, Subject
from parallel_backend.client.call import ModelCall
from parallel_backend.client.registry import Registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from testing import mini
from testing.emulated_device import EmulatedDevice, start_with

SUBJECT = replace(DEEPEST_FLUX_LIKE, side=16)
"""Many weights and few tokens: a call takes far less than copying them."""
MODES = {"ulysses": Degrees(ulysses=2), "pipefusion": Degrees(pipe=2), "tensor": Degrees(tensor=2)}
COPY_SECONDS = 1.0
ROOM = 1.3
"""Budget of a device over the weights of one model on it."""
CALLS = 3
"""Behind the first one of each turn."""


def measure(subject: Subject, files: list[Path], degrees: Degrees, rounds: int) -> dict[str, list[float]]:
    """Seconds by turn, from the second of each model on."""
    x, prompt = subject.problem_of_ranks()
    keys = [mini.setup(path, "fp32", ("cpu:0", "cpu:1"), degrees, "sdpa", "even") for path in files]

    def call(registry: Registry, key: Setup) -> float:
        started = time.perf_counter()
        registry.model(key, lambda: None).predict(ModelCall(x, torch.tensor([0.5]), prompt.positive), lambda: None)
        return time.perf_counter() - started

    with contextlib.closing(Registry()) as plain:
        plain.threads = 1
        call(plain, keys[0])
        largest = max(plain.present().weight_bytes)
        read_again = []
        for _ in range(rounds):
            plain.unload()
            read_again.append(call(plain, keys[0]) - statistics.median(call(plain, keys[0]) for _ in range(CALLS)))
    rate = largest / COPY_SECONDS
    found: dict[str, list[float]] = {"switch": [], "copies": [], "read again": read_again}
    with contextlib.closing(Registry()) as registry:
        registry.threads = 1
        registry.start_of = lambda devices: start_with(EmulatedDevice(int(ROOM * largest), rate))
        for number in range(1 + rounds):
            for key in keys:
                registry.begin_run()
                before = [registry.bytes_on(key, device) for device in key.devices]
                first = call(registry, key)
                usual = statistics.median(call(registry, key) for _ in range(CALLS))
                came = [registry.bytes_on(key, device) - had for device, had in zip(key.devices, before, strict=True)]
                if number:
                    found["switch"].append(first - usual)
                    found["copies"].append(max(came) / rate)
    return found


def main() -> None:
    options = measuring.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    found = {}
    with SUBJECT.saved() as path, tempfile.TemporaryDirectory() as other:
        files = [path, Path(shutil.copy(path, Path(other) / "other.safetensors"))]
        for mode, degrees in MODES.items():
            found[mode] = measure(SUBJECT, files, degrees, options.rounds)
    scope = "from the first call of a turn to its end, less a later call; both models were loaded before"
    head = measuring.head("several_models", SUBJECT, options.rounds, scope)
    head.pop("steps")
    shares = {
        mode: statistics.median(a / b for a, b in zip(got["switch"], got["copies"], strict=True))
        for mode, got in found.items()
    }
    figures = {
        **head,
        "devices": f"emulated: room for {ROOM:g} times a model's weights, which take {COPY_SECONDS:g} s from host memory",
        "median_seconds": {
            mode: {name: round(statistics.median(seconds), 3) for name, seconds in got.items()}
            for mode, got in found.items()
        },
        "switch_over_copies": {mode: round(share, 3) for mode, share in shares.items()},
    }
    measuring.report(figures, options.out)


if __name__ == "__main__":
    main()
