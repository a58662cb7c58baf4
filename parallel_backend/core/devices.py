"""Names of devices: cpu, cpu:1 and cuda:0 on this machine, ray:cpu and ray:cuda for any device of a Ray cluster. CPU names
with different numbers are different devices: pools on cpu:0,cpu:1 and on cpu:2,cpu:3 run at the same time."""

import importlib.util
import sys

from .short_text import short

RAY = "ray"
PREFIX = "ray:"
IN_AN_ACTOR = {"ray:cuda": "cuda:0", "ray:cpu": "cpu"}
"""Device of a Ray rank -> torch's name in its process: Ray shows an actor only its own GPU."""


def on_ray(device: str) -> bool:
    return device.startswith(PREFIX)


def device_kind(device: str) -> str:
    """Return the type of the device: cuda or cpu."""
    return device.removeprefix(PREFIX).partition(":")[0]


def in_its_process(device: str) -> str:
    """Torch's name for the device in its rank's process. On Windows a rank sees only one GPU (rank_environment.only_gpu)."""
    if sys.platform == "win32" and device.startswith("cuda"):
        return "cuda:0"
    return "cpu" if device_kind(device) == "cpu" else IN_AN_ACTOR.get(device, device)


def names_ray(text: str) -> bool:
    """Whether the `devices` widget asks for a Ray cluster."""
    return text.strip().lower() == RAY or text.strip().lower().startswith(PREFIX)


def ray_devices(text: str, world: int | None = None) -> tuple[str, ...]:
    """Return the devices of a list such as ray:cuda,cuda. `ray` alone means one GPU for each of `world` ranks.

    Raises ValueError for other names, for `ray` alone without `world`, and if the ray package is missing. Whether the
    cluster has the devices is found out when ranks start.
    """
    if importlib.util.find_spec(RAY) is None:
        raise ValueError(f"devices: {short(text.strip())} needs the ray package: pip install ray, in ComfyUI's environment.")
    text = text.strip().lower()
    if text == RAY:
        if world is None:
            raise ValueError("devices: 'ray' does not say how many devices. Name them, such as ray:cuda,cuda.")
        return ("ray:cuda",) * world
    names = tuple(part.strip().removeprefix(PREFIX) for part in text.split(","))
    for name in names:
        if PREFIX + name not in IN_AN_ACTOR:
            raise ValueError(
                f"devices: '{short(name)}' is not a device of a Ray cluster. Name cuda or cpu for each rank, such as "
                "ray:cuda,cuda. Ray chooses the machine and GPU."
            )
    return tuple(PREFIX + name for name in names)
