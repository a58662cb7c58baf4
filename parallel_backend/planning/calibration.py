"""The calibration of this machine: its ranks time a block and their links, which takes about ten seconds."""

import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.measurements import measured_blocks, measured_links, probe_of
from parallel_backend.core import kept_file
from parallel_backend.core.cores import usable_cores
from parallel_backend.core.devices import device_kind
from parallel_backend.placement.balance import without_noise
from parallel_backend.placement.gpu_overheads import context_bytes
from parallel_backend.placement.links import SIZES
from parallel_backend.placement.model_sizes import block_lists
from parallel_backend.placement.pipeline_model import HOP_SECONDS
from parallel_backend.processes.pool import Poll, Pool, wait_for
from parallel_backend.wire.diagnosis import DeviceMemoryReport, Probed, ReadMemory
from parallel_backend.wire.encoding import Encoding
from parallel_backend.wire.messages import LinksProbed

from .calibrated_costs import Calibration, DeviceCost, through
from .machine import Device, machine_of

ROWS = {"cuda": (64, 16), "cpu": (32, 8)}
"""Rows of image tokens in the two timed sequences: fewer do not fill a GPU, and more would take a CPU minutes."""
NAME = "calibration"
"""Of the files."""
VERSION = 8
"""Part of the key: files of older versions are measured again."""


def calibration_key(devices: Sequence[str], checkpoint: Checkpoint, dtype: str, attention: str) -> dict[str, object]:
    """Return everything that a calibration depends on: a file with another key is not used. Properties of a class that only
    some of its trials find, such as heads, are not part of the key: the class's kind determines them."""
    built = checkpoint.built
    return {
        "version": VERSION,
        "devices": [_device(name) for name in devices],
        "torch": torch.__version__,
        "class": built.kind,
        "blocks": [built.hidden, *sorted(built.counts)],
        "dtype": dtype,
        "packed": sorted({kind for name in checkpoint.key_map if (kind := checkpoint.storage(name, dtype))}),
        "attention": attention,
    }


def _device(name: str) -> list[object]:
    """[its name for torch, its hardware, bytes of memory or number of cores]."""
    if not name.startswith("cuda"):
        return [name, platform.machine(), usable_cores()]
    properties = torch.cuda.get_device_properties(name)
    return [name, properties.name, properties.total_memory]


def calibrate(pool: Pool, checkpoint: Checkpoint, dtype: str, poll: Poll) -> Calibration:
    """Measure links, memory and the time of blocks on the pool's ranks. The ranks lose their present model. Raises RankError
    if a rank fails."""
    wait_for(pool.ready, poll)
    links = measured_links(pool, SIZES, poll)
    memories = wait_for(pool.ask(ReadMemory(), DeviceMemoryReport), poll)
    rows = ROWS["cuda" if all(device_kind(device) == "cuda" for device in pool.devices) else "cpu"]
    probe = probe_of(checkpoint, dtype, rows)
    assert probe is not None, "asked for without a call of the class"
    probes = measured_blocks(pool, probe[0], block_lists(checkpoint), poll)
    return calibration_of(pool.devices, checkpoint, links, memories, probes, probe[1])


def calibration_of(
    devices: Sequence[str],
    checkpoint: Checkpoint,
    links: Sequence[LinksProbed],
    memories: Sequence[DeviceMemoryReport],
    probes: Sequence[Probed],
    tokens: tuple[int, int],
) -> Calibration:
    """Return the ranks' measurements as a calibration. `tokens`: of the longer and the shorter timed sequence."""
    share = checkpoint.built.attention_share
    costs = tuple(
        DeviceCost(
            {name: through(list(zip(tokens, times, strict=True)), share(name)) for name, times in probed.blocks.items()},
            through(list(zip(tokens, probed.ends, strict=True)), 0.0),
        )
        for probed in without_noise(block_lists(checkpoint), probes)
    )
    return Calibration(machine_of(devices, links, memories), costs, HOP_SECONDS)


def lasting(calibration: Calibration) -> Calibration:
    """Return the calibration for later runs: a GPU counts with all of its memory, because its free memory may change, less
    the CUDA contexts of ComfyUI's process and of a rank."""

    def memory(device: Device) -> int | None:
        return None if device.total is None else max(0, device.total - 2 * context_bytes(device.name))

    usable = tuple(replace(device, memory=memory(device), total=None) for device in calibration.machine.devices)
    return replace(calibration, machine=replace(calibration.machine, devices=usable))


_ENCODING = Encoding((Calibration,))


def keep(folder: Path, key: dict[str, object], calibration: Calibration) -> None:
    """Write the calibration to the key's file in `folder`, see kept_file.keep."""
    kept_file.keep(folder, key, NAME, json.loads(_ENCODING.encode(calibration)[0]))


def load(folder: Path, key: dict[str, object]) -> Calibration | None:
    """Return the calibration from the key's file in `folder`, see kept_file.find_kept."""
    return kept_file.find_kept(folder, key, NAME, lambda content: _ENCODING.decode(json.dumps(content).encode())[0].message)
