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
from parallel_backend.checkpoints.packed_formats import FP8_KINDS, GGUF_BLOCKS, HALF_KINDS, Fp8, GgufBlocks, Half
from parallel_backend.checkpoints.quantised_formats import KEPT, blank, int8_layer
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.rank.stage.build_stage import own_class_to_time, own_forward
from parallel_backend.rank.stage.linear import RankLinear
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
    """Seconds of a block of each list, and of the rest of the forward, for a longer and a shorter call. No collective."""
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
    """For each call: seconds by block list, and under AROUND those of the forward without the blocks."""
    dtype = compute_dtype(dtype_name, device)
    model, blocks = own_class_to_time(checkpoint.built, dtype)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            values = torch.empty_like(parameter, device=device).normal_(std=0.02)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    _pack(model, checkpoint, dtype_name, device)

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


def _pack(model: nn.Module, checkpoint: Checkpoint, dtype_name: str, device: torch.device) -> None:
    """Pack weights of linear layers like the file's. Quantised blocks are zeros, since random ones may have NaN scales."""
    RankLinear.adopt(model)
    dtype = compute_dtype(dtype_name, device)
    for name, module in model.named_modules():
        target = f"{name}.weight"
        left_out = not module._parameters  # of a block of an own class that is not timed
        if not isinstance(module, RankLinear) or left_out or target not in checkpoint.key_map:
            continue
        storage = checkpoint.storage(target, dtype_name)
        if storage is None:
            continue
        entry, (rows, columns) = checkpoint.entries[checkpoint.key_map[target]], module.weight.shape
        if storage in GGUF_BLOCKS:
            values, size = GGUF_BLOCKS[storage]
            packed = torch.zeros(rows, columns // values * size, dtype=torch.uint8, device=device)
            module.pack(packed, GgufBlocks(storage), dtype)
        elif storage in KEPT:
            module.pack(*blank(entry.layer or int8_layer(columns), rows, columns, device), dtype)
        elif storage in HALF_KINDS:
            module.pack(module.weight.to(HALF_KINDS[storage]).view(torch.uint8), Half(storage), dtype)
        else:
            scale = None if entry.scale is None else torch.ones(1, 1, device=device)
            full_precision = entry.dtype == storage and (entry.layer is None or entry.layer.full_precision)
            packed = module.weight.to(FP8_KINDS[storage]).view(torch.uint8)
            module.pack(packed, Fp8(storage, scale, full_precision=full_precision), dtype)
