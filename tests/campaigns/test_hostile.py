"""A cross-section of `python -m tests.campaigns.hostile`."""

import pytest

from testing.thread_ranks import thread_ranks
from tests.campaigns.hostile import files
from tests.campaigns.hostile.__main__ import degrees
from tests.campaigns.hostile.verdict import ranks_of, run

pytestmark = pytest.mark.slow
SEED = 1


@pytest.fixture(scope="module")
def ranks():
    with thread_ranks() as start, ranks_of(start) as ranks:
        yield ranks


@pytest.mark.parametrize(("kind", "count"), [("packed", 24), ("ggufs", 8)])
def test_quantised_files_are_named_or_run(ranks, tmp_path, kind, count):
    tally = run(kind, getattr(files, kind)(tmp_path), count, SEED, ranks, degrees)
    assert not tally.defects, tally.defects
    assert {"refused", "run"} <= set(tally.outcomes), tally


def test_single_files_are_named_or_run(ranks, tmp_path):
    tally = run("singles", files.singles(tmp_path), 12, SEED, ranks, degrees)
    assert not tally.defects, tally.defects
    assert tally.outcomes["refused"]


def test_folders_are_named_or_right(ranks, tmp_path):
    (made := tmp_path / "made").mkdir()
    tally = run("folders", files.folders(made, tmp_path), 12, SEED, ranks, degrees)
    assert not tally.defects, tally.defects
    assert tally.outcomes["refused"]
