"""Calibrations on disk: one small JSON file for each machine, kind of model and dtype."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel_backend.core import kept_file
from parallel_backend.placement.links import Link, Links

from .calibrated_costs import BlockCost, Calibration, DeviceCost
from .machine import Device, Machine

NAME = "calibration"


def cached(
    folder: Path,
    key: dict[str, object],
    measure: Callable[[], Calibration],
    fits: Callable[[Calibration], bool] = lambda _calibration: True,
) -> Calibration:
    """Return the calibration of `key` from its file in `folder`. If there is none, or it does not fit, it is measured and
    stored."""
    calibration = load(folder, key)
    if calibration is None or not fits(calibration):
        calibration = measure()
        keep(folder, key, calibration)
    return calibration


def keep(folder: Path, key: dict[str, object], calibration: Calibration) -> None:
    """Store the calibration, see kept_file.keep."""
    kept_file.keep(folder, key, NAME, _plain(calibration))


def load(folder: Path, key: dict[str, object]) -> Calibration | None:
    """Return the stored calibration, see kept_file.find_kept."""
    return kept_file.find_kept(folder, key, NAME, _calibration)


def _plain(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration as JSON values, without momentary free memory and P2P access."""
    machine, links = calibration.machine, calibration.machine.links
    return {
        "devices": [[device.name, device.kind, device.memory, device.copies] for device in machine.devices],
        "between": [[*pair, link.latency, link.bandwidth] for pair, link in links.between.items()],
        "shared": [links.crowding],
        "costs": [asdict(cost) for cost in calibration.costs],
        "hop": calibration.hop,
    }


def _calibration(content: dict[str, Any]) -> Calibration:
    """Return the inverse of `_plain`."""
    between = {(one, two): Link(*figures) for one, two, *figures in content["between"]}
    devices = tuple(Device(name, kind, memory, None, copies) for name, kind, memory, copies in content["devices"])
    costs = tuple(
        DeviceCost({name: BlockCost(**one) for name, one in cost["blocks"].items()}, BlockCost(**cost["around"]))
        for cost in content["costs"]
    )
    return Calibration(Machine(devices, Links(between, content["shared"][0])), costs, content["hop"])
