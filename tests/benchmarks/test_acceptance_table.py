"""The tables of benchmarks/results/self_tests.md are made of the committed results of self-tests."""

import json

import jsonschema
import pytest

from benchmarks.harness.acceptance_table import read, render
from benchmarks.harness.render import ROOT
from parallel_backend.acceptance.report import FORMAT, SCHEMA, VERSION

RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "self_tests.md"


def test_committed_results_are_of_the_schema_and_the_page_is_made_of_them():
    found = sorted(RESULTS.glob("acceptance_*.json"))
    assert found
    for path in found:
        jsonschema.validate(json.loads(path.read_text()), json.loads(SCHEMA.read_text()))
        assert path.stem.rsplit("_", 1)[1] == read(path)["date"][:10]
    assert render(RESULTS, PAGE) == PAGE.read_text()


def test_a_result_of_another_version_is_refused(tmp_path):
    path = tmp_path / "acceptance_x_2027-01-02.json"
    path.write_text(json.dumps({"format": FORMAT, "version": VERSION + 1}))
    with pytest.raises(ValueError, match="no result of the self-test"):
        read(path)
