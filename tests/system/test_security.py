"""What docs/security.md promises: nothing is unpickled or made into code, and nobody listens beyond this machine."""

import ast
import os
import socket
from pathlib import Path

import psutil
import pytest

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from testing import mini

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "imp", "subprocess"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "torch": {"load"},
    "np": {"load"},
    "numpy": {"load"},
    "yaml": {"load", "load_all", "unsafe_load", "full_load"},
    "connection": {"send", "recv"},  # multiprocessing's, which pickle
    "jit": {"load"},
    "os": {"system", "popen"},
}
OBJECTS = {
    *("send_object_list", "recv_object_list", "broadcast_object_list", "scatter_object_list"),
    *("all_gather_object", "gather_object"),
}
"""torch.distributed's that pickle, whatever that is imported as."""


def forbidden(source: str) -> list[str]:
    """Lines that unpickle, or make code of data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES]
            if isinstance(node, ast.ImportFrom):
                owner = (node.module or "").split(".")[-1]
                names = (METHODS.get(owner, set()) | OBJECTS) & {alias.name for alias in node.names}
                found += [f"{node.lineno}: import {name}" for name in names]
        elif isinstance(node, ast.Call):
            match node.func:
                case ast.Name(name) if name in CALLS:
                    found.append(f"{node.lineno}: {name}")
                case ast.Attribute(value, name):
                    owner = value.id if isinstance(value, ast.Name) else getattr(value, "attr", "")
                    if name in METHODS.get(owner, ()) or name in OBJECTS:
                        found.append(f"{node.lineno}: {owner}.{name}")
    return found


def test_nothing_is_unpickled_or_made_into_code():
    files = [ROOT / "__init__.py", *(ROOT / "nodes").rglob("*.py"), *(ROOT / "parallel_backend").rglob("*.py")]
    assert len(files) > 100
    for file in files:
        assert forbidden(file.read_text()) == [], file


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('a')",
        "from torch import load",
        "eval('1')",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "from torch.distributed import all_gather_object",
        "channel.connection.send(1)",
    ],
)
def test_the_search_finds_what_it_looks_for(source):
    assert forbidden(source)


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listening(pids) -> set[str]:
    """Addresses at which these processes can be reached, UDP included."""
    return {
        found.laddr.ip
        for pid in pids
        for found in psutil.Process(pid).net_connections("inet")
        if found.laddr and (found.status == psutil.CONN_LISTEN or found.type == socket.SOCK_DGRAM)
    }


@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(tensor=2)], ids=str)
def test_ranks_listen_on_loopback_and_the_client_nowhere(pools, mini_file, degrees):
    before = listening([os.getpid()])
    model = pools.mini(mini_file, degrees)
    model.predict(ModelCall(*mini.inputs()), lambda: None)
    heard = listening(model.pool.pids)
    assert heard  # the control: Gloo does listen, so there is something to see
    assert heard <= LOOPBACK
    assert listening([os.getpid()]) == before
