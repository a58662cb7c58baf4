"""The system is asked to read a model's files while ranks start, piece by piece, until somebody wants the values."""

import os
import threading
import time

import pytest

from parallel_backend.client import read_ahead
from parallel_backend.client.read_ahead import PIECE, ReadAhead

SIZE = 3 * PIECE + 5


@pytest.fixture
def files(tmp_path):
    """Two sparse files, which take no room."""
    made = [tmp_path / name for name in ("one.safetensors", "other.safetensors")]
    for path in made:
        path.touch()
        os.truncate(path, SIZE)
    return made


@pytest.fixture
def asked(monkeypatch):
    """Grows with (file's size, start, length) of each piece that is asked for."""
    found = []

    def fadvise(descriptor, start, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((os.fstat(descriptor).st_size, start, length))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    return found


def done() -> None:
    deadline = time.monotonic() + 60
    while any(thread.name == "parallel-dit read ahead" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_of_all_files_is_asked_for(files, asked):
    ReadAhead(files)
    done()
    assert asked == 2 * [(SIZE, start, PIECE) for start in range(0, SIZE, PIECE)]


def test_it_stops_before_the_next_piece(files, asked, monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    note = os.posix_fadvise

    def slow(*arguments):
        note(*arguments)
        reached.set()
        assert go_on.wait(60)

    monkeypatch.setattr(os, "posix_fadvise", slow)
    reading = ReadAhead(files)
    assert reached.wait(60)
    reading.stop()
    go_on.set()
    done()
    assert len(asked) == 1


def test_files_that_would_take_most_of_the_memory_are_left(files, asked, monkeypatch):
    monkeypatch.setattr(read_ahead, "host_memory", lambda: (3 * SIZE, 1 << 40))
    ReadAhead(files)
    done()
    assert not asked


def test_a_file_that_is_gone_is_for_its_reader_to_tell(files, asked):
    files[1].unlink()
    ReadAhead(files)
    done()
    assert not asked
