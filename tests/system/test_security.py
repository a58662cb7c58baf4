"""What docs/security.md promises: nothing is unpickled or made into code, and nobody listens beyond this machine."""

import ast
import os
import socket
import subprocess
import sys
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


@pytest.mark.parametrize("given", [None, "eth7"])
@pytest.mark.slow
def test_local_ranks_tell_both_libraries_to_stay_on_loopback(monkeypatch, given):
    """Unless the user has chosen another interface."""
    code = (
        "import datetime, os, pathlib, tempfile\n"
        "from parallel_backend.rank.comm import process_group, rendezvous\n"
        "process_group.dist.init_process_group = process_group.check_named = lambda *a, **k: None\n"
        "store = pathlib.Path(tempfile.mkdtemp()) / 'store'\n"
        "store.touch()\n"
        "second = datetime.timedelta(seconds=1)\n"
        "process_group.join(0, ('cpu', 'cpu'), rendezvous.Rendezvous(store, 2, second), second)\n"
        "print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'])\n"
    )
    chosen = {} if given is None else {"GLOO_SOCKET_IFNAME": given, "NCCL_SOCKET_IFNAME": given}
    others = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=others | chosen, capture_output=True, text=True, check=True
    )
    loopback = {"linux": "lo", "darwin": "lo0"}[sys.platform]
    assert done.stdout.split() == ([given, given] if given else [loopback, f"={loopback}"])
