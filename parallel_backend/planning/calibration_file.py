"""Calibrations on disk: one small JSON file for each machine, model family and dtype."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from .calibrated_costs import BlockCost, Calibration, DeviceCost
from .links import Link, Links, alike
from .machine import Device, Machine

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""Of a calibration's file. That of eight devices has about ten thousand."""
MAX_DEVICES = 1 << 10
LARGEST = 1e18
"""Of any figure: bytes, bytes per second or seconds."""


def cached(
    folder: Path,
    key: dict[str, object],
    measure: Callable[[], Calibration],
    fits: Callable[[Calibration], bool] = lambda _calibration: True,
) -> Calibration:
    """The calibration of `key` from its file in `folder`, or measured, and written there for the next time.

    A file that cannot be read, is of something else or does not fit, counts as none. A folder that cannot
    be written to is said in the log, and costs the next one the measurement.
    """
    path = folder / f"calibration-{hashlib.sha256(_text(key).encode()).hexdigest()[:16]}.json"
    found = load(path, key)
    if found is None or not fits(found):
        found = measure()
        try:
            store(path, key, found)
        except OSError as error:
            log.warning("Parallel DiT: the calibration could not be kept in %s (%s)", path, error)
    return found


def store(path: Path, key: dict[str, object], calibration: Calibration) -> None:
    """Atomically: whoever reads meanwhile sees the file before or after. OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    links = calibration.machine.links
    content = {
        "key": key,
        "devices": [[device.name, device.kind, device.memory] for device in calibration.machine.devices],
        "links": {
            "between": [[*pair, link.latency, link.bandwidth] for pair, link in links.between.items()],
            "crowding": links.crowding,
            "socket": links.socket,
            "bridge": links.bridge,
        },
        "costs": [asdict(cost) for cost in calibration.costs],
        "hop": calibration.hop,
    }
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1, allow_nan=False)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path, key: dict[str, object]) -> Calibration | None:
    """None if there is no such file, or it is damaged or of another key."""
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ValueError("no file, or too long")
        content = json.loads(path.read_text())
        if _text(content["key"]) != _text(key):
            return None
        return _calibration(content)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        log.info("Parallel DiT: %s is no calibration that can be used (%s); measuring again", path, error)
        return None


def _text(key: dict[str, object]) -> str:
    return json.dumps(key, sort_keys=True)


def _calibration(content: dict) -> Calibration:
    """ValueError, KeyError, TypeError for what is none."""
    devices = tuple(
        Device(str(name), str(kind), None if memory is None else int(_figure(memory)))
        for name, kind, memory in content["devices"]
    )
    if not 0 < len(devices) <= MAX_DEVICES:
        raise ValueError("it has no devices, or too many")
    links = content["links"]
    between = {
        (_whole(one), _whole(two)): Link(_figure(latency), _figure(bandwidth, least=1.0))
        for one, two, latency, bandwidth in links["between"]
    }
    if between.keys() != alike(len(devices), Link(0.0, 1.0)).keys():
        raise ValueError("it has not a link for every two devices")
    crowding = _figure(links["crowding"], least=1.0)
    costs = tuple(
        DeviceCost({str(name): _block(one) for name, one in cost["blocks"].items()}, _cost(cost["around"]))
        for cost in content["costs"]
    )
    if len(costs) != len(devices):
        raise ValueError("it has not the costs of every device")
    machine = Machine(devices, Links(between, crowding, _whole(links["socket"]), _figure(links["bridge"])))
    return Calibration(machine, costs, _figure(content["hop"]))


def _cost(cost: dict) -> BlockCost:
    return BlockCost(_figure(cost["fixed"]), _figure(cost["token"]), _figure(cost["pairs"]))


def _block(cost: dict) -> BlockCost:
    found = _cost(cost)
    if found.fixed + found.token == 0.0:
        raise ValueError("a block takes no time")
    return found


def _whole(value: int) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value} is no count")
    return value


def _figure(value: float, least: float = 0.0) -> float:
    if isinstance(value, bool) or not least <= value <= LARGEST:
        raise ValueError(f"{value} is no figure")
    return float(value)
