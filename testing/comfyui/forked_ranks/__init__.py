"""A custom node pack for tests only, without a node: ranks are forked from a process with all imports done.

A spawned rank would do the imports itself: 7 s of a core. Ranks are not forked from ComfyUI's process, which has threads.
"""

import contextlib
import importlib.util
import os
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import comfy.cli_args
import torch.multiprocessing

ROOT = Path(__file__).resolve().parents[3]
NODE_CLASS_MAPPINGS = {}

# By its path: the repository's folder need not be on ComfyUI's path when this pack is loaded.
spec = importlib.util.spec_from_file_location("fork_server", ROOT / "testing" / "fork_server.py")
fork_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fork_server)

imports = [*fork_server.IMPORTS, *os.environ.get("PARALLEL_DIT_FIRST", "").split()]
if comfy.cli_args.args.cpu:
    imports.append("testing.comfyui.rank_imports")
context = torch.multiprocessing.get_context("forkserver")
context.set_forkserver_preload(imports)
places = {"PYTHONPATH": str(ROOT), "PARALLEL_DIT_COMFYUI": str(Path(comfy.cli_args.__file__).resolve().parents[1])}
# Where that process finds what it imports, and before ComfyUI's folder, which has `tests` too.
with contextlib.chdir(ROOT), mock.patch.dict(os.environ, places):
    forkserver.ensure_running()
torch.multiprocessing.get_context = lambda _method: context
