"""Packages that an import is to do without, and torch's compiler."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_backend.rank.start.import_blocker import blocked_imports


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of one that is installed and has not been imported."""
    (tmp_path / "installed_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "installed_here"
    sys.modules.pop("installed_here", None)


def test_a_package_looks_as_if_it_were_not_installed_until_the_end(package):
    with blocked_imports(package, "not_installed_anyway"):
        assert importlib.util.find_spec(package) is None
        with pytest.raises(ImportError):
            importlib.import_module(package)
    assert importlib.import_module(package).__name__ == package
    assert "not_installed_anyway" not in sys.modules


def test_an_error_within_ends_it_too(package):
    with pytest.raises(RuntimeError, match="within"), blocked_imports(package):
        raise RuntimeError("within")
    assert importlib.util.find_spec(package) is not None


@pytest.mark.slow
def test_a_rank_starts_without_torchs_compiler_which_still_compiles_afterwards():
    """In a process of its own: here the compiler may have been imported."""
    text = """
import sys, torch
from parallel_backend.rank.start.import_blocker import UNUSED, light_imports
disable = torch.compiler.disable
with light_imports():
    import diffusers.models.transformers
    import parallel_backend.rank.worker
assert torch.compiler.disable is disable
assert not {"torch._dynamo", "sympy", *UNUSED} & sys.modules.keys(), "imported all the same"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item() == 1
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", text], check=True, cwd=Path(__file__).parents[2])
