"""The pack says which ComfyUI and which diffusers it needs, before it imports what an older one lacks."""

import importlib.metadata
import logging
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from host_version import DIFFUSERS, OLDEST, check_backend, check_comfyui, check_diffusers, warn_of_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1", "0.40", "1.0.0", "v0.33.1", "0.33.0+12", "nightly"])
def test_new_enough(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__=version))
    check_comfyui()


@pytest.mark.parametrize("version", ["0.32.9", "0.3.64", "0.4", "v0.9.0", "0.32.0+1"])
def test_too_old(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__=version))
    with pytest.raises(RuntimeError, match=re.escape(f"needs ComfyUI 0.33.0 or newer, and this one is {version}. Update")):
        check_comfyui()


def test_the_registry_is_told_the_same():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert tables["tool"]["comfy"]["requires-comfyui"] == ">=" + ".".join(map(str, OLDEST))


def installed(monkeypatch, version):
    """diffusers of that version; None: none."""

    def found(name):
        assert name == "diffusers"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


@pytest.mark.parametrize("version", ["0.38.0", "0.42.1", "0.42", "0.42.1+cu130", "0.38.0.dev0", "main"])
def test_diffusers_that_it_is_tested_with(monkeypatch, caplog, version):
    installed(monkeypatch, version)
    check_diffusers()
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["0.37.1", "0.9.0", "0.37.9.dev0"])
def test_an_older_diffusers_is_refused_by_its_version(monkeypatch, version):
    installed(monkeypatch, version)
    with pytest.raises(RuntimeError, match=re.escape(f"needs diffusers 0.38 to 0.42, and {version} is installed. Install")):
        check_diffusers()


@pytest.mark.parametrize("version", ["0.43.0", "0.50.2", "1.0.0", "0.43.0.dev0"])
def test_a_newer_diffusers_is_warned_of(monkeypatch, caplog, version):
    installed(monkeypatch, version)
    check_diffusers()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"tested with diffusers 0.38 to 0.42, and {version} is installed" in record.getMessage()


def test_pip_and_the_readme_have_the_same_diffusers():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (major, oldest), (_, newest) = DIFFUSERS
    assert f"diffusers>={major}.{oldest},<{major}.{newest + 1}" in required
    for readme in ("README.md", "README.zh.md"):
        assert f"diffusers {major}.{oldest} " in (ROOT / readme).read_text(encoding="utf-8")
        assert f" {major}.{newest}" in (ROOT / readme).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "lost"),
    [("parallel-dit", ""), ("Parallel_DiT2", ""), ("parallel.dit", "help pages"), ("Parallel DiT", "menu entry, panel")],
)
def test_a_folder_that_comfyui_cannot_serve_is_warned_of(caplog, name, lost):
    warn_of_folder(name)
    assert len(caplog.records) == bool(lost)
    assert not lost or (f"Parallel DiT's {lost}" in caplog.text and f"'{name}'. Rename it to parallel-dit" in caplog.text)


def test_an_installed_copy_of_the_backend_is_refused(tmp_path):
    check_backend(ROOT)
    with pytest.raises(RuntimeError, match=re.escape(f"also installed in {ROOT}. Remove it")):
        check_backend(tmp_path)
