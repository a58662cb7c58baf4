"""Calibrations on disk: one small JSON file for each machine, kind of model and dtype."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel_backend.core.kept_file import UNREADABLE, kept_path, read_kept, write_kept
from parallel_backend.placement.links import Link, Links

from .calibrated_costs import BlockCost, Calibration, DeviceCost
from .machine import Device, Machine

log = logging.getLogger(__name__)

NAME = "calibration"


def cached(
    folder: Path,
    key: dict[str, object],
    measure: Callable[[], Calibration],
    fits: Callable[[Calibration], bool] = lambda _calibration: True,
) -> Calibration:
    """The calibration of `key` from its file in `folder`; else it is measured and kept there.

    A file that cannot be read, has another key or does not fit is measured again.
    """
    calibration = load(kept_path(folder, key, NAME), key)
    if calibration is None or not fits(calibration):
        calibration = measure()
        keep(folder, key, calibration)
    return calibration


def keep(folder: Path, key: dict[str, object], calibration: Calibration) -> None:
    """Atomically, see write_json. If the folder cannot be written to, a warning is logged, and it is measured again."""
    path = kept_path(folder, key, NAME)
    try:
        write_kept(path, key, NAME, _plain(calibration))
    except OSError as error:
        log.warning("Parallel DiT: the calibration could not be kept in %s (%s)", path, error)


def load(path: Path, key: dict[str, object]) -> Calibration | None:
    """None if there is no such file, it has another key, or it was changed after `keep` wrote it."""
    try:
        content = read_kept(path, key, NAME)
        return None if content is None else _calibration(content)
    except UNREADABLE as error:
        log.info("Parallel DiT: %s is no calibration that can be used (%s); measuring again", path, error)
        return None


def _plain(calibration: Calibration) -> dict[str, Any]:
    """The calibration as JSON values, without momentary free memory and P2P access."""
    machine, links = calibration.machine, calibration.machine.links
    return {
        "devices": [[device.name, device.kind, device.memory, device.copies] for device in machine.devices],
        "between": [[*pair, link.latency, link.bandwidth] for pair, link in links.between.items()],
        "shared": [links.crowding],
        "costs": [asdict(cost) for cost in calibration.costs],
        "hop": calibration.hop,
    }


def _calibration(content: dict[str, Any]) -> Calibration:
    """The inverse of `_plain`."""
    between = {(one, two): Link(*figures) for one, two, *figures in content["between"]}
    devices = tuple(Device(name, kind, memory, None, copies) for name, kind, memory, copies in content["devices"])
    costs = tuple(
        DeviceCost({name: BlockCost(**one) for name, one in cost["blocks"].items()}, BlockCost(**cost["around"]))
        for cost in content["costs"]
    )
    return Calibration(Machine(devices, Links(between, content["shared"][0])), costs, content["hop"])
