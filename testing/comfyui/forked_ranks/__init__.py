"""A custom node pack for tests only, without a node: ranks are forked from a process with all imports done.

Spawned, each would import it anew: 4 s of a core. ComfyUI itself is not what they are forked from, since it has threads.
"""

import importlib.util
import os
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch.multiprocessing

ROOT = Path(__file__).resolve().parents[3]
NODE_CLASS_MAPPINGS = {}

# By its path: ComfyUI's checkout has a package `tests` of its own.
spec = importlib.util.spec_from_file_location("fork_server", ROOT / "testing" / "fork_server.py")
fork_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fork_server)

context = torch.multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*fork_server.IMPORTS])
with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):  # where that process finds what it imports
    forkserver.ensure_running()
torch.multiprocessing.get_context = lambda _method: context
