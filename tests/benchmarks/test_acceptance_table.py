"""The tables of benchmarks/results/self_tests.md are made of the committed results of self-tests."""

import json

import jsonschema

from benchmarks.harness.acceptance_table import read, render
from benchmarks.harness.render import ROOT
from parallel_backend.acceptance.report import SCHEMA

RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "self_tests.md"


def test_committed_results_are_of_the_schema_and_the_page_is_made_of_them():
    found = sorted(RESULTS.glob("acceptance_*.json"))
    assert found
    for path in found:
        jsonschema.validate(json.loads(path.read_text()), json.loads(SCHEMA.read_text()))
        assert path.stem.rsplit("_", 1)[1] == read(path)["date"][:10]
    assert render(RESULTS, PAGE) == PAGE.read_text()
