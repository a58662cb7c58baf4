"""A cross-section of `python -m tests.campaigns.hostile`."""

import pytest

from testing.thread_ranks import thread_ranks
from tests.campaigns.hostile import files, loras
from tests.campaigns.hostile.verdict import fault_of, ranks_of, run
from tests.comfyui.conftest import comfyui  # noqa: F401 (a fixture)
from tests.support.planted_comfyui import planted_comfyui

SEED = 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [("own_classes", 20), ("packed", 16), ("ggufs", 6)],
)
def test_files_are_named_or_run(tmp_path, kind, count):
    with planted_comfyui(), thread_ranks() as start, ranks_of(start) as ranks:
        tally = run(kind, getattr(files, kind)(tmp_path), count, SEED, ranks)
    assert not tally.defects, tally.defects
    assert {"refused", "run"} <= set(tally.outcomes), tally


@pytest.mark.full
@pytest.mark.comfyui
def test_lora_files_are_named_or_right(comfyui, tmp_path):  # noqa: F811
    tally = loras.run(comfyui, tmp_path, 16, SEED)
    assert not tally.defects, tally.defects
    assert {"refused", "run"} <= set(tally.outcomes), tally


@pytest.mark.parametrize("text", ["model: \x1b[2J", "model: " + "x" * 3000])
def test_an_error_that_acts_on_a_terminal_or_is_long_is_a_defect(text):
    assert fault_of(text) and fault_of("model: x", cause=text)
    assert not fault_of("model: x", "y")
