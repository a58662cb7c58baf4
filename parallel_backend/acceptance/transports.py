"""Compares NCCL's settings of direct access between GPUs (P2P), and keeps the fastest one for these GPUs.

By default NCCL gives P2P to GPUs below one PCIe switch and to those with NVLink (ncclTopoCheckP2p, nccl src/graph/paths.cc).
Across the host's PCIe lanes P2P is faster on some machines, and slower than host memory on others. Settings for more
channels are not compared: each channel of a receive that waits occupies a multiprocessor.
"""

import os

from parallel_backend.client.measurements import measured_links
from parallel_backend.placement.links import SIZES, links_of
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.comm.process_group import backend_for
from parallel_backend.wire.rank_settings import (
    BY_NCCL,
    P2P_EVERYWHERE,
    P2P_OVER_NVLINK,
    P2P_VARIABLES,
    TRANSPORTS,
    WITHOUT_P2P,
)

from .session import Findings, NotLookedAt, SelfTestSession

COMPARED = (BY_NCCL, P2P_EVERYWHERE, P2P_OVER_NVLINK, WITHOUT_P2P)
CLEARLY = 1.1
"""A setting replaces NCCL's own choice if it is this many times faster: less may be noise."""
FAILED = "failed"


def look_at_transports(session: SelfTestSession, findings: Findings) -> None:
    """Start ranks by each setting, whose links are tested for right values then, and time messages between all at once."""
    devices = session.settings.devices
    if session.world == 1 or backend_for(devices) != "nccl":
        raise NotLookedAt("ranks on these devices do not use NCCL")
    if users := [name for name in P2P_VARIABLES if name in os.environ]:
        raise NotLookedAt(f"{' and '.join(users)} is set in the environment")
    found: dict[str, float | str] = {}
    for transport in COMPARED:
        pool = session.ranks_by(transport)
        works = pool.self_test.transport == transport
        found[transport.name] = rate(pool, session) if works else FAILED
    findings.note("GB_per_s", found)
    if (best := fastest(found)) is None:
        raise NotLookedAt("NCCL works by none of its settings")
    session.keep(TRANSPORTS[best])
    findings.note("kept", best)
    findings.note("variables", [f"{name}={value}" for name, value in TRANSPORTS[best].variables])


def rate(pool: Pool, session: SelfTestSession) -> float:
    """Return the GB/s in one direction of the slowest link while all ranks send."""
    links = links_of(measured_links(pool, SIZES, session.poll))
    return min(links.link(*pair).bandwidth for pair in links.between) / 1e9


def fastest(found: dict[str, float | str]) -> str | None:
    """Return the name of the setting to use, by the settings' GB/s or FAILED. None: all have failed."""
    rates = {name: rate for name, rate in found.items() if isinstance(rate, float)}
    if not rates:
        return None
    best = max(rates, key=lambda name: rates[name])
    return best if rates[best] >= CLEARLY * rates.get(BY_NCCL.name, 0.0) else BY_NCCL.name
