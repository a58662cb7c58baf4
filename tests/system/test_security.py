"""What docs/security.md promises: nothing is unpickled or made into code, and nobody listens beyond this machine."""

import ast
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from testing import mini
from testing.models import on_ranks

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "imp"}
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


def sources() -> list[Path]:
    return [ROOT / "__init__.py", *(ROOT / "nodes").rglob("*.py"), *(ROOT / "parallel_backend").rglob("*.py")]


def test_nothing_is_unpickled_or_made_into_code():
    files = sources()
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
        "import numpy as np\nnp.load('a', allow_pickle=True)",
        "eval('1')",
        "exec('1')",
        "__import__('os')",
        "import marshal",
        "import yaml\nyaml.load('a')",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import torch\ntorch.distributed.all_gather_object([], 1)",
        "from torch.distributed import all_gather_object",
        "self.connection.recv()",
        "channel.connection.send(1)",
    ],
)
def test_the_search_finds_what_it_looks_for(source):
    assert forbidden(source)


def test_the_search_leaves_others_alone():
    assert not forbidden("import json\njson.load(file)\nchannel.send(1)\nself.connection.recv_bytes(1)\nmodel.eval()")


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
MODES = [
    Degrees(pipe=2),
    Degrees(batch=2),
    Degrees(ulysses=2),
    Degrees(ring=2),
    Degrees(tensor=2),
    Degrees(patch=2, patch_mode="displaced"),
    Degrees(patch=2, patch_mode="naive"),
]


def listening(pids) -> set[str]:
    """Addresses at which these processes can be reached, UDP included."""
    return {
        found.laddr.ip
        for pid in pids
        for found in psutil.Process(pid).net_connections("inet")
        if found.laddr and (found.status == psutil.CONN_LISTEN or found.type == socket.SOCK_DGRAM)
    }


@pytest.mark.parametrize("degrees", MODES, ids=str)
def test_in_every_mode_ranks_listen_on_loopback_and_the_client_nowhere(pools, mini_file, degrees):
    before = listening([os.getpid()])
    model = pools.mini(mini_file, degrees)
    model.predict(ModelCall(*mini.inputs()), lambda: None)
    heard = listening(model.pool.pids)
    assert heard  # the control: Gloo does listen, so there is something to see
    assert heard <= LOOPBACK
    assert listening([os.getpid()]) == before


def test_measuring_listens_on_loopback_too(pools, mini_file):
    """stage_split auto, the doctor and the planner make no store or group of their own elsewhere."""
    from parallel_backend.processes.pool import wait_for
    from parallel_backend.wire import messages as m

    pool = pools(2)
    pools.forget(2)
    wait_for(pool.ask(m.ProbeLinks((1024,)), m.LinksProbed), lambda: None)
    on_ranks(pool, mini.opened(mini_file), Degrees(pipe=2), "fp32", "sdpa", lambda: None, "auto")
    assert listening(pool.pids) <= LOOPBACK


def test_a_socket_that_anybody_can_reach_would_be_seen():
    with socket.socket() as open_to_all:
        open_to_all.bind(("0.0.0.0", 0))
        open_to_all.listen()
        assert "0.0.0.0" in listening([os.getpid()])


def test_the_store_of_the_rendezvous_is_the_users_alone(pools):
    directory = pools(2).ranks.directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.stat().st_uid == os.getuid()


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
