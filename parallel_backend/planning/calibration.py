"""The machine that is there, in few numbers: the ranks' own timings of blocks and links, about ten seconds in all."""

import os
import platform
from collections.abc import Sequence

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.placement.balance import without_noise
from parallel_backend.client.placement.measurements import measured_blocks, measured_links
from parallel_backend.client.placement.memory_model import joint_text
from parallel_backend.client.placement.pipeline_model import HOP_SECONDS
from parallel_backend.core.devices import device_kind
from parallel_backend.processes.pool import Poll, Pool, wait_for
from parallel_backend.wire.diagnosis import PROBE_COLUMNS, PROBE_TEXT, Probe, Probed
from parallel_backend.wire.messages import LinksProbed

from .cost_model import Job
from .links import SIZES, fit
from .machine import Device, Links, Machine, pairs_of, through
from .workload import Workload

ROWS = {"cuda": (64, 16), "cpu": (32, 8)}
"""Of image tokens: a GPU is not filled by less, and a CPU would take minutes for more."""
CONTEXTS = 1_500_000_000
"""Bytes of a GPU that the processes on it need for themselves."""
VERSION = 1
"""Of what a calibration is; an older file does not count."""


def job_of(checkpoint: Checkpoint, subject: Workload) -> Job:
    """`subject` as a run of this checkpoint."""
    return Job(subject, joint_text(checkpoint))


def fingerprint(devices: Sequence[str], checkpoint: Checkpoint, dtype: str, attention: str) -> dict[str, object]:
    """What a calibration is true for."""
    family, config = checkpoint.family, checkpoint.config
    return {
        "version": VERSION,
        "devices": [_device(name) for name in devices],
        "torch": torch.__version__,
        "family": family.name,
        "blocks": [family.sizes.hidden(config), family.sizes.heads(config), *sorted(family.blocks.counts(config))],
        "dtype": dtype,
        "attention": attention,
    }


def _device(name: str) -> list[object]:
    """[its name for torch, what it is, bytes of memory or number of cores]."""
    if not name.startswith("cuda"):
        return [name, platform.machine(), os.cpu_count()]
    properties = torch.cuda.get_device_properties(name)
    return [name, properties.name, properties.total_memory]


def calibrate(pool: Pool, checkpoint: Checkpoint, dtype: str, poll: Poll) -> Machine:
    """Takes the ranks' model away. RankError if one fails."""
    wait_for(pool.ready, poll)
    found = measured_links(pool, SIZES, poll)
    rows = ROWS["cuda" if all(device_kind(device) == "cuda" for device in pool.devices) else "cpu"]
    lists = [name for name, count in checkpoint.family.blocks.counts(checkpoint.config).items() if count]
    probes = measured_blocks(pool, Probe(str(checkpoint.path), dtype, rows), lists, poll)
    return machine_of(pool.devices, checkpoint, found, probes, rows)


def machine_of(
    devices: Sequence[str],
    checkpoint: Checkpoint,
    found: Sequence[LinksProbed],
    probes: Sequence[Probed],
    rows: tuple[int, int],
) -> Machine:
    family, config = checkpoint.family, checkpoint.config
    linear = "pipe" in family.unsupported  # its attention has no keys to look at, so it costs nothing for each
    pairs = 0.0 if linear else pairs_of(family.sizes.hidden(config))
    text = PROBE_TEXT if joint_text(checkpoint) else 0
    tokens = [count * PROBE_COLUMNS + text for count in rows]
    lists = [name for name, count in family.blocks.counts(config).items() for _ in range(count)]
    ranks = []
    for rank, probed in enumerate(without_noise(lists, probes)):
        blocks = {name: through(list(zip(tokens, times, strict=True)), pairs) for name, times in probed.blocks.items()}
        around = through(list(zip(tokens, probed.ends, strict=True)), 0.0)
        total = found[rank].total_bytes
        memory = None if total is None else max(0, total - CONTEXTS)
        ranks.append(Device(devices[rank], found[rank].name, blocks, around, memory))
    return Machine(tuple(ranks), links_of(found), hop=HOP_SECONDS)


def links_of(found: Sequence[LinksProbed]) -> Links:
    """`crowding` is what the exchange of all took, over what it would take if links did not disturb each other."""
    between = {(rank.rank, other): fit(times) for rank in found for other, times in rank.links.items()}
    if not between:
        return Links({})
    size = max(SIZES)
    quiet = Links(between)
    everyone = range(len(found))
    alone = quiet.exchange([everyone], size * (len(found) - 1))
    together = max(rank.together for rank in found)
    return Links(between, max(1.0, together / alone))
