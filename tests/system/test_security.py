"""What docs/security.md promises: nothing is unpickled or made into code, and nobody listens beyond this machine."""

import os
import re
import socket
from pathlib import Path

import psutil
import pytest

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from testing import mini

ROOT = Path(__file__).resolve().parents[2]
UNSEEN = re.compile(r"connection\.(send|recv)\(|(?<![\w.])(compile|__import__)\(")
"""multiprocessing's connections pickle. All else that unpickles or makes code is refused by ruff (pyproject.toml)."""


def test_nothing_is_unpickled_or_made_into_code():
    files = [ROOT / "__init__.py", *(ROOT / "nodes").rglob("*.py"), *(ROOT / "parallel_backend").rglob("*.py")]
    assert len(files) > 100
    assert [file for file in files if UNSEEN.search(file.read_text(encoding="utf-8"))] == []


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
    heard = listening(model.pool.whole.ranks.pids)
    assert heard  # the control: Gloo does listen, so there is something to see
    assert heard <= LOOPBACK
    assert listening([os.getpid()]) == before
