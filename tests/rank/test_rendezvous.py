"""The file by which ranks find each other: what removes or damages it is an error at once, and no wait without end."""

import shutil
from contextlib import closing

import pytest

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool, RankError
from parallel_backend.rank.comm.rendezvous import StoreError, StoreFile
from tests.support import tiny


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


def test_one_that_is_gone_at_the_start(tmp_path):
    with pytest.raises(StoreError, match="was removed"):
        StoreFile(tmp_path / "store")


@pytest.mark.processes
@pytest.mark.parametrize("whole", [False, True], ids=["the file", "its folder"])
def test_a_cleaner_of_temporary_files_is_named(flux_file, whole):
    """Without the look at the file the ranks would wait in the making of the next model's groups."""
    with closing(Pool(("cpu", "cpu"))) as pool:
        given = tiny.inputs(tiny.FLUX)

        def load(degrees: Degrees) -> RemoteTransformer:
            return RemoteTransformer(pool, open_checkpoint(flux_file), degrees, "fp32", "sdpa", lambda: None)

        load(Degrees(pipe=2)).predict(*given, lambda: None)
        if whole:
            shutil.rmtree(pool.ranks.directory)
        else:
            remove(pool.ranks.directory / "store")
        with pytest.raises(RankError, match=r"rank \d \(cpu\) failed in loading: StoreError: the file .* was removed"):
            load(Degrees(ulysses=2))
