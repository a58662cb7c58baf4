"""A file of GPUs between which NCCL works only without direct access (P2P), or does not work. Such a link hangs, and the
self-test of the links needs a minute to notice it: once, not at each start of ComfyUI.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.json_file import write_json
from parallel_backend.wire.rank_settings import P2P_DISABLE

log = logging.getLogger(__name__)

FILE = "without_p2p.json"
MAX_BYTES = 1 << 16
MOST = 32
"""Maximum number of verdicts of the file, the newest ones."""
MACHINE = tuple(map(Path, ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/proc/cmdline")))
"""The drivers' versions, and the kernel's options, such as for the IOMMU."""
IOMMU = Path("/sys/class/iommu")
"""Folder with an entry for each active unit."""

WITH_P2P, WITHOUT_P2P, BY_GLOO = range(3)
"""How ranks talk."""
FIELDS, GLOO = {"cards", "machine"}, {"gloo": True}

Verdict = dict[str, Any]
"""`cards`: their UUIDs, sorted. `machine`: a digest of the other facts that decide how they can transfer. With `gloo` NCCL
does not work, without it NCCL works without P2P."""


class P2PVerdicts:
    """Not thread-safe. `folder`: of the file; if it returns None, verdicts live as long as the process."""

    def __init__(self, folder: Callable[[], Path | None]):
        self._folder = folder
        self._here: dict[tuple[str, ...], int] = {}

    def way(self, devices: tuple[str, ...]) -> int:
        """How ranks on these devices should transfer, as found by this process or an earlier one with the same GPUs and
        driver."""
        if devices in self._here:
            return self._here[devices]
        path = self._path(devices)
        if path is None or not path.is_file():
            return WITH_P2P
        known, verdict = _read(path), _verdict(devices)
        if not any(_same(one, verdict) for one in known):
            return WITH_P2P
        by_gloo = verdict | GLOO in known
        log.info(
            "Parallel DiT: %s between %s, as at an earlier start. To try it again, delete %s",
            *("no NCCL" if by_gloo else "no direct access (P2P)", ", ".join(devices), path),
        )
        return BY_GLOO if by_gloo else WITHOUT_P2P

    def turn_to(self, devices: tuple[str, ...], way: int) -> None:
        """For now: it is unknown yet whether this helps."""
        self._here[devices] = way

    def keep(self, devices: tuple[str, ...], way: int) -> None:
        """Note that these devices work in this way. Later starts use it until driver, GPUs, torch, NCCL or the IOMMU
        change."""
        self._here[devices] = way
        if (path := self._path(devices)) is not None:
            verdict = _verdict(devices) | (GLOO if way == BY_GLOO else {})
            others = [one for one in _read(path) if one["cards"] != verdict["cards"]]
            _write(path, [*others, verdict][-MOST:])

    def forget(self, devices: tuple[str, ...]) -> None:
        """Ranks on these devices try NCCL with P2P again."""
        self._here.pop(devices, None)
        path = self._path(devices)
        if path is not None and path.is_file():
            known, verdict = _read(path), _verdict(devices)
            others = [one for one in known if not _same(one, verdict)]
            if len(others) < len(known):
                _write(path, others)

    def _path(self, devices: tuple[str, ...]) -> Path | None:
        """None if nothing is stored: for CPUs and for GPUs of a Ray cluster, which may differ next time."""
        folder = self._folder()
        kept = folder is not None and all(device_kind(name) == "cuda" and not on_ray(name) for name in devices)
        return folder / FILE if kept and folder is not None else None


def _verdict(devices: tuple[str, ...]) -> Verdict:
    """The verdict for these GPUs in their present state. Asks for their properties alone, which makes no context on a
    GPU."""
    properties = [torch.cuda.get_device_properties(name) for name in devices]
    cards = sorted(str(getattr(one, "uuid", one.name)) for one in properties)
    facts = [torch.__version__, platform.release(), *(path.read_text() for path in MACHINE if path.is_file())]
    facts += [str(len(list(IOMMU.iterdir())) if IOMMU.is_dir() else 0), os.environ.get(P2P_DISABLE, ""), nccl_version()]
    return {"cards": cards, "machine": hashlib.sha256("\n".join(facts).encode()).hexdigest()}


def nccl_version() -> str:
    """Of the library that torch has loaded, which may be newer than the one torch came with. Empty without NCCL."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return ""
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _same(one: Verdict, other: Verdict) -> bool:
    """Whether both are of the same GPUs on the same machine."""
    return all(one[name] == other[name] for name in FIELDS)


def _read(path: Path) -> list[Verdict]:
    """The file's verdicts. None if the file is missing or was not written by `_write`: it is written again."""
    try:
        if not path.exists():
            return []
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("it is too long")
        verdicts = json.loads(path.read_text())["verdicts"]
        if not all(isinstance(one, dict) and {*one} - {*GLOO} == FIELDS for one in verdicts):
            raise ValueError("it has something else in it")
        return list(verdicts)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        log.warning("Parallel DiT: %s is not a list of GPUs without P2P (%s), and is ignored", path, error)
        return []


def _write(path: Path, verdicts: list[Verdict]) -> None:
    """Atomically. A folder that cannot be written to is logged: the next start then tries P2P again."""
    try:
        write_json(path, {"verdicts": verdicts})
    except OSError as error:
        log.warning("Parallel DiT: the failure of P2P could not be stored in %s (%s)", path, error)
