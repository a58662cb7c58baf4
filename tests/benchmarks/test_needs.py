"""A benchmark whose package is missing says which command installs it, and shows its help all the same."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.needs import PACKAGES, need
from scripts.requirements import name_of, required

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import runpy, sys
for name in ("comfy_kitchen", "sklearn", "pytest", "tests"):
    sys.modules[name] = None
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^a format needs comfy_kitchen, .*: python -m pip install comfy-kitchen=="):
        need("comfy_kitchen", "a format")


def test_a_package_that_is_there_is_not():
    need("sklearn", "what reads digits")


def test_they_are_named_as_pyproject_has_them():
    known = {name_of(line): line for line in required(["dev", "benchmarks"])}
    assert all(known[name_of(package)].startswith(package) for package in PACKAGES.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "speed.offload",
        *(
            pytest.param(module, marks=pytest.mark.full)
            for module in ("speed.one_rank_native", "fidelity.guidance", "speed.changed_text")
        ),
    ],
)
def test_help_is_shown_without_what_only_tests_need(module):
    command = [sys.executable, "-c", WITHOUT, f"benchmarks.{module}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_a_quantised_format_without_comfy_kitchen_is_refused_with_the_command():
    command = [sys.executable, "-c", WITHOUT, "benchmarks.speed.loading", "--formats", "fp8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("python -m pip install comfy-kitchen==0.2.31")
