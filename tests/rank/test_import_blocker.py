"""Packages that an import is to do without."""

import importlib.util
import sys

import pytest

from parallel_backend.rank.start.import_blocker import blocked_imports


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of one that is installed and has not been imported."""
    (tmp_path / "installed_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "installed_here"
    sys.modules.pop("installed_here", None)


def test_it_looks_as_if_it_were_not_installed_until_the_end(package):
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


def test_what_has_been_imported_stays():
    with blocked_imports("json"):
        assert importlib.import_module("json") is sys.modules["json"] is not None
