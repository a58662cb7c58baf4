"""A benchmark whose package is missing says which command installs it."""

import importlib.util

import pytest

from benchmarks.harness.needs import PACKAGES, need
from scripts.requirements import name_of, required


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^a format needs comfy_kitchen, .*: python -m pip install comfy-kitchen=="):
        need("comfy_kitchen", "a format")


def test_they_are_named_as_pyproject_has_them():
    known = {name_of(line): line for line in required(["dev", "benchmarks"])}
    assert all(known[name_of(package)].startswith(package) for package in PACKAGES.values())
