"""The system is asked to read a model's file while ranks start, piece by piece, until somebody wants the values."""

import os
import threading

import pytest

from parallel_backend.client.read_ahead import PIECE, ReadAhead

SIZE = 3 * PIECE + 5


@pytest.mark.parametrize("stops", [False, True])
def test_all_of_the_file_is_asked_for_until_it_is_stopped(tmp_path, monkeypatch, stops):
    path = tmp_path / "one.safetensors"
    path.touch()
    os.truncate(path, SIZE)  # without blocks on the disk
    asked, reached, go_on = [], threading.Event(), threading.Event()

    def fadvise(descriptor, start, length, advice):
        asked.append((os.fstat(descriptor).st_size, start, length))
        reached.set()
        assert advice == os.POSIX_FADV_WILLNEED and go_on.wait(60)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    reading = ReadAhead(path)
    assert reached.wait(60)
    if stops:
        reading.stop()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "parallel-dit read ahead":
            thread.join(60)
    assert asked == [(SIZE, start, PIECE) for start in range(0, SIZE, PIECE)][: 1 if stops else None]
