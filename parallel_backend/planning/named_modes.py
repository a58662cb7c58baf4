"""Degrees of a mode that the user names, such as `ulysses`: Parallelize Model's `mode`."""

from dataclasses import replace

from parallel_backend.core.degrees import Degrees

AUTO = "auto"
AXIS = {"pipefusion": "pipe", "ulysses": "ulysses", "ring": "ring", "tensor": "tensor", "split batch": "batch"}
"""Mode -> the axis that gets all ranks not used by parallel_config."""
MODES = (AUTO, *AXIS)


def ranks_of(mode: str, wanted: int, possible: int, config: Degrees) -> int:
    """Return the number of devices that the mode uses. `wanted`: 0 for all `possible` ones. `config`: degrees of the input
    parallel_config. Raises ValueError, naming `gpus`, if the config's ranks do not divide the wanted number."""
    multiplies = config.world == 1 or mode in ("pipefusion", "tensor", "split batch")
    if wanted == 0:
        return max(config.world, possible // config.world * config.world) if multiplies else config.world
    if wanted == config.world or (multiplies and wanted % config.world == 0):
        return wanted
    multiple = " or a multiple of it" if multiplies else ""
    raise ValueError(
        f"gpus is {wanted}, but parallel_config has {config}, for {config.world}{multiple}. Set gpus to 0, or to that "
        "number."
    )


def degrees_of(mode: str, ranks: int, config: Degrees) -> Degrees:
    """The degrees of `mode`, which is not auto, on `ranks` ranks: those of `config`, with `mode`'s axis multiplied."""
    axis = AXIS[mode]
    return replace(config, **{axis: getattr(config, axis) * (ranks // config.world)})
