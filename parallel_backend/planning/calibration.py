"""The calibration of the machine that is there: the ranks time a block and their links, about ten seconds in all."""

import os
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.measurements import measured_blocks, measured_links
from parallel_backend.core.devices import device_kind
from parallel_backend.placement.balance import without_noise
from parallel_backend.placement.gpu_overheads import context_bytes
from parallel_backend.placement.links import SIZES
from parallel_backend.placement.model_sizes import joint_text
from parallel_backend.placement.pipeline_model import HOP_SECONDS
from parallel_backend.processes.pool import Poll, Pool, wait_for
from parallel_backend.wire.diagnosis import PROBE_COLUMNS, PROBE_TEXT, DeviceMemoryReport, Probe, Probed, ReadMemory
from parallel_backend.wire.messages import LinksProbed

from .calibrated_costs import Calibration, DeviceCost, pairs_of, through
from .machine import machine_of

ROWS = {"cuda": (64, 16), "cpu": (32, 8)}
"""Rows of image tokens that blocks are timed with: a GPU is not filled by less, and a CPU would take minutes for more."""
VERSION = 5
"""Version of the calibration. An older file does not count."""


def contexts(device: str) -> int:
    """Bytes of a GPU that processes on it need for themselves: ComfyUI's and a rank's. The memory model counts libraries."""
    return 2 * context_bytes(device)


def calibration_key(devices: Sequence[str], checkpoint: Checkpoint, dtype: str, attention: str) -> dict[str, object]:
    """What a calibration is true for."""
    family, config = checkpoint.family, checkpoint.config
    return {
        "version": VERSION,
        "devices": [_device(name) for name in devices],
        "torch": torch.__version__,
        "family": family.name,
        "blocks": [family.sizes.hidden(config), family.sizes.heads(config), *sorted(family.blocks.counts(config))],
        "dtype": dtype,
        "packed": sorted({kind for name in checkpoint.key_map if (kind := checkpoint.storage(name, dtype))}),
        "attention": attention,
    }


def _device(name: str) -> list[object]:
    """[its name for torch, what it is, bytes of memory or number of cores]."""
    if not name.startswith("cuda"):
        return [name, platform.machine(), os.cpu_count()]
    properties = torch.cuda.get_device_properties(name)
    return [name, properties.name, properties.total_memory]


def calibrate(pool: Pool, checkpoint: Checkpoint, dtype: str, poll: Poll) -> Calibration:
    """Takes the ranks' model away. RankError if one fails."""
    wait_for(pool.ready, poll)
    found = measured_links(pool, SIZES, poll)
    memories = wait_for(pool.ask(ReadMemory(), DeviceMemoryReport), poll)
    rows = ROWS["cuda" if all(device_kind(device) == "cuda" for device in pool.devices) else "cpu"]
    lists = [name for name, count in checkpoint.family.blocks.counts(checkpoint.config).items() if count]
    probes = measured_blocks(pool, Probe(str(checkpoint.path), dtype, rows), lists, poll)
    return calibration_of(pool.devices, checkpoint, found, memories, probes, rows)


def calibration_of(
    devices: Sequence[str],
    checkpoint: Checkpoint,
    found: Sequence[LinksProbed],
    memories: Sequence[DeviceMemoryReport],
    probes: Sequence[Probed],
    rows: tuple[int, int],
) -> Calibration:
    """What the ranks found, as a calibration. A GPU counts with all of its memory: what is free now may change."""
    family, config = checkpoint.family, checkpoint.config
    linear = "pipe" in family.unsupported  # its attention has no keys to look at, so it costs nothing for each
    pairs = 0.0 if linear else pairs_of(family.sizes.hidden(config))
    text = PROBE_TEXT if joint_text(checkpoint) else 0
    tokens = [count * PROBE_COLUMNS + text for count in rows]
    lists = [name for name, count in family.blocks.counts(config).items() for _ in range(count)]
    costs = tuple(
        DeviceCost(
            {name: through(list(zip(tokens, times, strict=True)), pairs) for name, times in probed.blocks.items()},
            through(list(zip(tokens, probed.ends, strict=True)), 0.0),
            probed.keeping,
        )
        for probed in without_noise(lists, probes)
    )
    machine = machine_of(devices, found, memories)
    usable = tuple(
        replace(device, memory=None if device.total is None else max(0, device.total - contexts(device.name)), total=None)
        for device in machine.devices
    )
    return Calibration(replace(machine, devices=usable), costs, HOP_SECONDS)
