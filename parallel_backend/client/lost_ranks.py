"""Decides what a sampling run does after its ranks are lost: whether it tries again, and with which degrees and devices."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.validate import all_degrees

MOST_TRIES = 2
"""Maximum number of further tries of a sampling run."""


class FurtherTries:
    """The further tries of one sampling run. `tell`: shows the user a line."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.count = 0
        self._tell, self._over = tell, False
        self._lost: Callable[[], object | None] = lambda: None  # weak reference to the model that was lost last

    def allows(self, model: object | None, next_try: Callable[[], str]) -> bool:
        """Whether to try again after `model` lost its ranks. None: they were lost when the model was loaded again.

        `next_try` prepares the next try and returns a line for the user. Empty: the next try would fail in the same way.
        Calls in progress fail together. The first of them to ask calls `next_try`; the others may then try again without it.
        """
        if self._over or (model is not None and self._lost() is model):
            return not self._over
        if (model is None and not self.count) or self.count == MOST_TRIES or not (line := next_try()):
            self._over = True
            return False
        self.count += 1
        self._lost = (lambda: None) if model is None else weakref.ref(model)
        self._tell(line)
        return True


def devices_left(devices: Sequence[str], lost: Sequence[str]) -> tuple[str, ...]:
    """`devices` without the lost ones; all of them if none would be left. All ranks of a local GPU are removed, but only one
    for each lost rank on CPUs and Ray, whose devices share a name."""
    left = list(devices)
    for name in lost:
        if device_kind(name) == "cuda" and not on_ray(name):
            left = [each for each in left if each != name]
        elif name in left:
            left.remove(name)
    return tuple(left or devices)


def degrees_left(before: Degrees, ranks: int, is_possible: Callable[[Degrees], bool]) -> Degrees:
    """Return the degrees with which a run that had the degrees `before` can continue on at most `ranks` ranks.

    Only axes that the run used get more than one rank. If several degrees are possible, those with the least weights on each
    rank are returned. Copies and patches do not increase, because a call may be too small. Stages may replace tensor ranks,
    whose number must divide the layers.
    """
    used = {axis for axis in AXES if getattr(before, axis) > 1} | ({"pipe"} if before.tensor > 1 else set())

    def continues(degrees: Degrees) -> bool:
        fewer = degrees.batch <= before.batch and degrees.patch <= before.patch
        return fewer and all(axis in used for axis in AXES if getattr(degrees, axis) > 1)

    for world in range(ranks, 1, -1):
        every = [degrees for degrees in all_degrees(world) if continues(degrees)]
        of_mode = [replace(degrees, patch_mode=before.patch_mode) if degrees.patch > 1 else degrees for degrees in every]
        if found := list(filter(is_possible, of_mode)):
            return max(found, key=lambda degrees: degrees.pipe * degrees.tensor)
    return Degrees()
