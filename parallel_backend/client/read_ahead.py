"""Has the system read a model's file into free memory, before ranks need their values.

Pages are read, and nothing is kept: no process has the values, and the system can use the memory otherwise. A reader that
comes meanwhile finds the pages that are there, and reads the others itself.
"""

import logging
import os
import threading
from pathlib import Path

from parallel_backend.core.host_memory import host_memory

log = logging.getLogger(__name__)

PIECE = 1 << 24
"""Bytes asked for at once, between two checks whether to stop. The call waits if the disk is busy."""
SHARE = 0.5
"""Share of free host memory for the file, so that pages in use, such as those of a text encoder's file, stay."""


def read_ahead(present: "ReadAhead | None", file: Path) -> "ReadAhead":
    """Begins to read `file`, instead of the one that `present` reads."""
    if present is not None:
        if present.file == file:
            return present
        present.stop()
    return ReadAhead(file)


class ReadAhead:
    """Reading that is in progress. Linux only: elsewhere a read would use a core to copy pages."""

    def __init__(self, file: Path):
        self.file = file
        self._stopped = threading.Event()
        if hasattr(os, "posix_fadvise"):
            threading.Thread(target=self._read, name="parallel-dit read ahead", daemon=True).start()

    def stop(self) -> None:
        """Read no further. Never waits."""
        self._stopped.set()

    def _read(self) -> None:
        try:
            with self.file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                if size > SHARE * host_memory()[0]:
                    return
                for start in range(0, size, PIECE):
                    if self._stopped.is_set():
                        return
                    os.posix_fadvise(opened.fileno(), start, PIECE, os.POSIX_FADV_WILLNEED)
        except OSError as error:  # whoever reads the values has the error
            log.info("Parallel DiT: nothing is read ahead (%s)", error)
