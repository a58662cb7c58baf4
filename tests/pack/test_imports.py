"""What ComfyUI's process pays for having the pack installed: an import that starts nothing and pulls in nothing heavy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CLIENT_SIDE = """
import multiprocessing, sys, threading
import torch  # ComfyUI has it already
before = set(sys.modules)
import parallel_backend.client.pipefusion.banded_run, parallel_backend.client.registry
import parallel_backend.client.reports.run_report, parallel_backend.planning.report
import parallel_backend.planning.calibration
import parallel_backend.client.vae
import parallel_backend.quickstart.codec, parallel_backend.quickstart.prompt, parallel_backend.quickstart.model
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"diffusers", "transformers", "sklearn", "matplotlib", "flash_attn", "comfy", "nodes"}))
print(threading.active_count(), multiprocessing.active_children())
"""
COMFYUI = ("comfy", "comfy_extras", "execution", "folder_paths", "server")
"""What a module of ComfyUI's is called, beside `nodes`, which is here the pack's own."""

RANK_SIDE = f"""
import importlib, importlib.util, pkgutil, sys
import parallel_backend.rank.start.entry
tops = lambda: {{name.partition(".")[0] for name in sys.modules}}
print(*sorted(tops() & {{"torch", "diffusers", "numpy"}}))
import parallel_backend.rank.worker
print("torch" in sys.modules, "diffusers" in sys.modules)
for module in pkgutil.walk_packages(parallel_backend.__path__, "parallel_backend."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted(tops() & {{"nodes", *{COMFYUI}}}))
print(all(importlib.util.find_spec(name) for name in {COMFYUI}))
"""
"""Then all of the backend, where ComfyUI's modules are there to be found."""


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
runpy.run_module("parallel_backend.acceptance", run_name="__main__")
"""
"""The self-test's command line."""


def run(code: str, path: Path | None = None) -> list[str]:
    """What it prints. `path`: where modules are found beside the usual places."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_the_client_imports_nothing_heavy_and_starts_nothing():
    assert run(CLIENT_SIDE) == ["[]", "1 []"]


@pytest.mark.slow
def test_a_rank_imports_the_models_and_neither_comfyui_nor_the_nodes(tmp_path):
    """ComfyUI's modules are empty ones here: an import that is guarded against their absence would be seen too."""
    for name in COMFYUI:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    assert run(RANK_SIDE, tmp_path) == ["", "True False", "", "True"]


@pytest.mark.parametrize(("arguments", "code", "said"), [(["--help"], 0, "--devices"), ([], 2, "torch is not installed")])
def test_the_self_tests_help_is_shown_where_torch_is_missing(arguments, code, said):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
