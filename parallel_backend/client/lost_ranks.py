"""What a sampling run does after its ranks are lost: whether it tries again, and with which degrees on fewer devices."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.validate import all_degrees

MOST_TRIES = 2
"""Further tries of a sampling run."""


class FurtherTries:
    """The further tries of one sampling run. `tell`: shows the user a line."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.count = 0
        self._tell, self._over = tell, False
        self._lost: Callable[[], object | None] = lambda: None  # weak reference to the model that was lost last

    def allows(self, model: object | None, next_try: Callable[[], str]) -> bool:
        """Whether to try again after `model` lost its ranks. None: the model's next load lost them.

        `next_try` prepares that and returns a line for the user. Empty: no try would end otherwise. Calls in progress fail
        together: each of them may be tried again, and `next_try` is called for the first of them.
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
    """`devices` without those that are lost: all ranks of a GPU here, but one for each on the CPU or on Ray, whose devices
    share a name. All, if none would be left."""
    left = list(devices)
    for name in lost:
        if device_kind(name) == "cuda" and not on_ray(name):
            left = [each for each in left if each != name]
        elif name in left:
            left.remove(name)
    return tuple(left or devices)


def degrees_left(before: Degrees, ranks: int, is_possible: Callable[[Degrees], bool]) -> Degrees:
    """The degrees in which a run with the degrees `before` can go on with most of so many ranks, on the axes that it used.

    Those with least weights on each rank. Copies and patches do not become more: a call may be too small. Stages may replace
    tensor ranks, whose number divides the layers.
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
