"""What a process that is forked from this one, such as by another node pack, lets go of ranks, which are not its own."""

import contextlib
import functools
import multiprocessing.process
import os
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """Ranks as a forked process has them."""

    def let_go(self) -> None:
        """Close this process's copies of the connections to the ranks. To be called in the forked process alone: never
        blocks."""


def let_go_when_forked(ranks: Inherited) -> None:
    """From now on every process that is forked from this one lets these ranks go, while they exist."""
    _living().add(ranks)


def not_ended_at_exit(processes: Iterable[Any]) -> None:
    """This process, a forked one, does not end these processes of its parent when it ends itself.

    multiprocessing's own exit function terminates all daemonic children that it knows, without checking their parent.
    """
    for process in processes:
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


@functools.cache
def _living() -> WeakSet[Inherited]:
    living: WeakSet[Inherited] = WeakSet()

    def let_go() -> None:
        for ranks in list(living):
            with contextlib.suppress(OSError):  # closed already
                ranks.let_go()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=let_go)
    return living
