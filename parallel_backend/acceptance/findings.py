"""The findings of a self-test's check: its figures, failures, and parts that could not be checked."""

import contextlib
from collections.abc import Iterator
from typing import Any

from parallel_backend.processes.pool import RankError


class NotLookedAt(Exception):
    """A check cannot be made here. The text says why, as the end of a sentence."""


class Findings:
    """`figures`: name -> JSON value. `wrong`: failures. `left_out`: parts that could not be checked, with the reason."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.left_out: list[str] = []

    def note(self, name: str, value: Any) -> None:
        self.figures[name] = value

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Note a figure, which is wrong above the limit, or if it is NaN."""
        self.note(name, value)
        self.expect(value <= limit, f"{name} is {value:.3g}, above its limit of {limit:.3g}")

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Around a part `what` of a check, such as a mode, so that the other parts are checked whatever happens in it.

        A RankError in it is a failure. A ValueError is a refusal: the part is left out.
        """
        try:
            yield
        except RankError as error:
            self.wrong.append(f"{what}: {error}")
        except ValueError as refusal:
            self.leave_out(what, str(refusal))

    def leave_out(self, what: str, reason: str) -> None:
        self.left_out.append(f"{what}: {reason}")
