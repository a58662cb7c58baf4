"""The pack says which ComfyUI it needs, before it imports what an older one lacks."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib

from host_version import OLDEST, check_comfyui

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["0.3.64", "0.3.65", "0.4", "0.33.0", "1.0.0", "v0.33.1", "0.3.64+12", "nightly"])
def test_new_enough(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__=version))
    check_comfyui()


@pytest.mark.parametrize("version", ["0.3.63", "0.3", "0.2.99", "v0.3.9", "0.3.63+1"])
def test_too_old(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__=version))
    with pytest.raises(RuntimeError, match=re.escape(f"needs ComfyUI 0.3.64 or newer, and this one is {version}. Update")):
        check_comfyui()


def test_one_that_says_no_version_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfyui_version", None)
    with pytest.raises(RuntimeError, match="does not say its version"):
        check_comfyui()


def test_the_registry_is_told_the_same():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert tables["tool"]["comfy"]["requires-comfyui"] == ">=" + ".".join(map(str, OLDEST))
