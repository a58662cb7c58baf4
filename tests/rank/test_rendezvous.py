"""The file by which ranks find each other: what removes or damages it is an error at once, and no wait without end."""

import threading
import time
from datetime import timedelta

import pytest

from parallel_backend.rank.comm.rendezvous import Rendezvous, StoreError, StoreFile


@pytest.fixture
def path(tmp_path):
    (tmp_path / "store").touch()
    return tmp_path / "store"


def append(path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def remove(path) -> None:
    path.unlink()


def replace(path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content + b"more")


def cut(path) -> None:
    path.write_bytes(b"a")


def test_what_ranks_add_is_fine(path):
    store = StoreFile(path)
    for _ in range(3):
        append(path, b"some")
        store.check()


@pytest.mark.parametrize(("harm", "word"), [(remove, "removed"), (replace, "removed"), (cut, "cut short")])
def test_harm_is_seen(path, harm, word):
    store = StoreFile(path)
    append(path, b"some")
    store.check()
    harm(path)
    with pytest.raises(StoreError, match=f"was {word}"):
        store.check()


def test_the_store_waits_as_long_as_the_pool(path):
    """Left to itself it is 5 minutes, whatever the process group's timeout is."""
    store = Rendezvous(path, 2, timedelta(seconds=0.3)).store
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="300 ms"):
        store.get("what no rank writes")
    assert 0.2 < time.monotonic() - began < 30


def test_who_comes_first_waits_for_who_comes_last(path):
    first, last = (Rendezvous(path, 2, timedelta(seconds=30)) for _ in range(2))
    for _ in range(2):
        met = threading.Event()
        thread = threading.Thread(target=lambda met=met: (first.meet(), met.set()))
        thread.start()
        assert not met.wait(0.1)
        last.meet()
        assert met.wait(20)
        thread.join()
