"""Times a block of each kind on this rank's device, in the model's forward.

Weights are random, and packed like the file's.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.stage.build_stage import own_class_to_time, own_forward
from parallel_backend.rank.stage.tensor_parallel import TensorPlan
from parallel_backend.rank.stage.weights import PACKED, VALUES, StageWeights
from parallel_backend.wire.diagnosis import OwnCall, Probed

REPEATS = 5
AROUND = "around the blocks"


class _Stopwatch:
    """Seconds spent in each watched module, the median of several runs."""

    def __init__(self, device: torch.device):
        self.device = device
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._started = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def watch(self, name: str, module: nn.Module) -> None:
        def enter(*_: object) -> None:
            self._started = self.now()

        def leave(*_: object) -> None:
            self.note(name, self.now() - self._started)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def note(self, name: str, seconds: float) -> None:
        self._seconds[name].append(seconds)

    def restart(self) -> None:
        self._seconds.clear()

    def read(self) -> dict[str, float]:
        return {name: median(times) for name, times in self._seconds.items()}


@torch.inference_mode()
def probe(rank: int, checkpoint: Checkpoint, device: torch.device, dtype_name: str, calls: Sequence[OwnCall]) -> Probed:
    """Seconds of a block of each list, and of the rest of the forward, for a longer and a shorter call. Not collective."""
    # Two calls, since a block's time has a constant part: packed weights are expanded at each use, for any sequence.
    long, short = _measure(checkpoint, device, dtype_name, calls)
    times: dict[str, tuple[float, ...]] = {name: (long[name], short[name]) for name in long}
    free = None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the measured model is freed
        free = torch.cuda.mem_get_info(device)[0]
    around = times.pop(AROUND)
    return Probed(rank, times, around, free)


def _measure(
    checkpoint: Checkpoint, device: torch.device, dtype_name: str, calls: Sequence[OwnCall]
) -> list[dict[str, float]]:
    """For each call: list of blocks -> seconds of a block, and AROUND -> seconds of the forward without blocks."""
    dtype = compute_dtype(dtype_name, device)
    model, blocks = own_class_to_time(checkpoint.built, dtype)
    _fill(model, checkpoint, dtype_name, device)
    watch, results = _Stopwatch(device), []
    for name, block in blocks.items():
        watch.watch(name, block)
    for call in calls:
        run = own_forward(model, call, device, dtype)
        run()  # the first run also allocates and picks kernels
        watch.restart()
        for _ in range(REPEATS):
            started = watch.now()
            run()
            watch.note(AROUND, watch.now() - started)
        inside = watch.read()
        whole = inside.pop(AROUND)
        results.append(inside | {AROUND: max(0.0, whole - sum(inside.values()))})
    return results


def _fill(model: nn.Module, checkpoint: Checkpoint, dtype_name: str, device: torch.device) -> None:
    """Give the model random weights, and move its buffers to the device. Packed bytes are zero, as random ones may be
    NaN."""
    alone = TensorPlan({}, Axis("tensor", 1, 0, (0,), None))
    here = model.state_dict()  # blocks that are not timed have no weights
    weights = StageWeights(
        model, checkpoint, [name for name in checkpoint.key_map if name in here], alone, device, dtype_name
    )
    for target in weights.targets:
        places = {}
        for name, tensor in weights.tensors(target).items():
            new = torch.zeros if name == PACKED else torch.ones
            place = new(tensor.shape, device=device).to(tensor.dtype)
            places[name] = place.normal_(std=0.02) if name == VALUES else place
        weights.move(target, places)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
