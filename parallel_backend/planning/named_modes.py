"""Degrees of a mode that the user names, such as `ulysses`, on so many devices: Parallelize Model's `mode`."""

from dataclasses import replace

from parallel_backend.core.degrees import Degrees

AUTO = "auto"
AXIS = {"pipefusion": "pipe", "ulysses": "ulysses", "ring": "ring", "tensor": "tensor", "split batch": "batch"}
"""Mode -> axis whose ranks are all that are left."""
MODES = (AUTO, *AXIS)


def ranks_of(mode: str, wanted: int, possible: int, given: Degrees) -> int:
    """How many devices the mode uses. `wanted`: 0 for all `possible` ones; `given`: degrees that are taken as they are.

    ValueError, naming `gpus`, where the given degrees do not go into that number.
    """
    multiplies = given.world == 1 or mode in ("pipefusion", "tensor", "split batch")
    if wanted == 0:
        return max(given.world, possible // given.world * given.world) if multiplies else given.world
    if wanted == given.world or (multiplies and wanted % given.world == 0):
        return wanted
    multiple = " or a multiple of it" if multiplies else ""
    raise ValueError(
        f"gpus is {wanted}, but parallel_config has {given}, for {given.world}{multiple}. Set gpus to 0, or to that number."
    )


def degrees_of(mode: str, ranks: int, given: Degrees, heads: int) -> Degrees:
    """The degrees of `mode`, not auto, on so many ranks, with those of `given` as they are. `heads`: the model's attention
    heads, by which Ulysses is limited: it takes ring ranks for the rest."""
    left = ranks // given.world
    if mode == "ulysses" and left > heads:
        ulysses = max(degree for degree in range(1, heads + 1) if left % degree == 0)
        return replace(given, ulysses=ulysses, ring=left // ulysses)
    axis = AXIS[mode]
    return replace(given, **{axis: getattr(given, axis) * left})
