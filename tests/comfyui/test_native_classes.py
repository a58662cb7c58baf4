"""Every class of models that ComfyUI has is computed by a family, or refused by the loader before anything is started."""

import pytest

from parallel_backend.families import FAMILIES

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def found(inside):
    return inside.run("native_classes")[0]


def test_a_native_file_of_every_class_is_ours_or_refused(found):
    found = {kind: got for kind, got in found.items() if kind != "header entries"}
    ours = {kind for family in FAMILIES.values() for kind in family.native_classes}
    assert ours <= set(found)
    assert len(found) > 90
    loaded = {kind: got for kind, got in found.items() if "error" not in got}
    assert loaded == {kind: {"model": kind} for kind in ours}
    refused = [got["error"] for kind, got in found.items() if kind not in ours]
    assert [error for error in refused if not error.startswith("ValueError: model_name: ")] == []


def test_a_header_says_nothing_that_we_overlook(found):
    for family, entries in found["header entries"].items():
        file = FAMILIES[family].file
        assert {*file.header.values, *file.settings} >= set(entries)
