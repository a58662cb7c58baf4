"""A custom node pack for tests only, without a node: ranks are forked from a process with all imports done.

A spawned rank would do the imports itself: 4 s of a core. Ranks are not forked from ComfyUI's process, which has threads.
"""

import contextlib
import importlib.util
import os
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch.multiprocessing

ROOT = Path(__file__).resolve().parents[3]
NODE_CLASS_MAPPINGS = {}

# By its path: the repository's folder need not be on ComfyUI's path when this pack is loaded.
spec = importlib.util.spec_from_file_location("fork_server", ROOT / "testing" / "fork_server.py")
fork_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fork_server)

context = torch.multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*fork_server.IMPORTS, *os.environ.get("PARALLEL_DIT_FIRST", "").split()])
# Where that process finds what it imports, and before ComfyUI's folder, which has `tests` too.
with contextlib.chdir(ROOT), mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
    forkserver.ensure_running()
torch.multiprocessing.get_context = lambda _method: context
