"""Has the system read a model's files into free memory, before ranks need their values.

Pages are read, and nothing is kept: no process has the values, and the system can use the memory otherwise. A reader that
comes meanwhile finds the pages that are there, and reads the others itself.
"""

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from parallel_backend.core.host_memory import host_memory

log = logging.getLogger(__name__)

PIECE = 1 << 24
"""Bytes asked for at once, between two checks whether to stop. The call waits if the disk is busy."""
SHARE = 0.5
"""Share of free host memory for the files, so that pages in use, such as those of a text encoder's file, stay."""


def read_ahead(present: "ReadAhead | None", files: frozenset[Path]) -> "ReadAhead | None":
    """Begins to read `files`, instead of the files that `present` reads. Nothing begins without files."""
    if not files or (present is not None and present.files == files):
        return present
    if present is not None:
        present.stop()
    return ReadAhead(files)


class ReadAhead:
    """Reading that is under way. Linux only: elsewhere a read would use a core to copy pages."""

    def __init__(self, files: Iterable[Path]):
        self.files = frozenset(files)
        self._stopped = threading.Event()
        if hasattr(os, "posix_fadvise"):
            threading.Thread(target=self._read, name="parallel-dit read ahead", daemon=True).start()

    def stop(self) -> None:
        """Read no further. Never waits."""
        self._stopped.set()

    def _read(self) -> None:
        try:
            sizes = {file: file.stat().st_size for file in sorted(self.files)}
            if sum(sizes.values()) > SHARE * host_memory()[0]:
                return
            for file, size in sizes.items():
                with file.open("rb") as opened:
                    for start in range(0, size, PIECE):
                        if self._stopped.is_set():
                            return
                        os.posix_fadvise(opened.fileno(), start, PIECE, os.POSIX_FADV_WILLNEED)
        except OSError as error:  # whoever reads the values has the error
            log.info("Parallel DiT: nothing is read ahead (%s)", error)
