"""The process that started this one, and whether it is alive. This module only needs the standard library."""

import os
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess


class ParentProcess:
    """`process`: multiprocessing.parent_process(). It is recognized by its id, not by its open pipes: a process forked from
    it, such as a worker of another node pack, keeps them open and may outlive it."""

    def __init__(self, process: BaseProcess):
        assert process.pid is not None, "a parent has been started"
        self._process, self._pid = process, process.pid
        self._handle: int | None = None
        self._gone = False
        try:
            self._handle = os.pidfd_open(self._pid)
        except ProcessLookupError:
            self._gone = True
        except (AttributeError, OSError):  # not Linux, an old kernel, or a container that forbids it
            self._handle = None

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended. Returns as soon as it has, or after `seconds`."""
        if self._handle is not None:
            return bool(wait([self._handle], seconds))
        # An orphan gets another parent. On Windows it keeps the number, but there the sentinel is the process itself.
        return self._gone or bool(wait([self._process.sentinel], seconds)) or os.getppid() != self._pid
