"""What ComfyUI's process pays for having the pack installed: an import that starts nothing and pulls in nothing heavy."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CLIENT_SIDE = """
import multiprocessing, sys, threading
import torch  # ComfyUI has it already
before = set(sys.modules)
import parallel_backend.client.pipefusion.banded_run, parallel_backend.client.registry
import parallel_backend.client.reports.run_report, parallel_backend.planning.doctor_report
import parallel_backend.planning.calibration_file, parallel_backend.planning.calibration
import parallel_backend.planning.planner_report
import parallel_backend.checkpoints.vae_keys, parallel_backend.client.vae
import parallel_backend.quickstart.codec, parallel_backend.quickstart.prompt, parallel_backend.quickstart.model
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"diffusers", "transformers", "sklearn", "matplotlib", "flash_attn", "comfy", "nodes"}))
print(threading.active_count(), multiprocessing.active_children())
"""
RANK_SIDE = "import sys, parallel_backend.rank.worker; print('diffusers' in sys.modules, 'nodes' in sys.modules)"

STARTED_RANK = """
import importlib.util, sys, types
from datetime import timedelta
stub = sys.modules["parallel_backend.rank.worker"] = types.ModuleType("worker")
stub.run = lambda settings, connection: None
from parallel_backend.processes import entry
from parallel_backend.wire import rank_settings
entry.main(rank_settings.RankSettings(0, ("cpu",), ("", 0), 1, timedelta(1), 1.0), None)
del sys.modules["parallel_backend.rank.worker"]
import parallel_backend.rank.worker, diffusers.models.transformers.transformer_flux
print([name for name in ("scipy.stats", "transformers") if name in sys.modules], bool(importlib.util.find_spec("scipy")))
"""
"""As entry.main does it, up to the class of a model."""


def run(code: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_the_client_imports_nothing_heavy_and_starts_nothing():
    assert run(CLIENT_SIDE) == ["[]", "1 []"]


def test_a_rank_imports_the_models_and_none_of_the_nodes():
    assert run(RANK_SIDE) == ["True False"]


def test_a_rank_starts_without_what_only_pipelines_want_although_it_is_installed():
    assert run(STARTED_RANK) == ["[] True"]
