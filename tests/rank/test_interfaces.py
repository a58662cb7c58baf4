"""Where Gloo and NCCL are told to listen, on each system, and what is said where Gloo cannot run at all."""

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from parallel_backend.rank.comm import process_group
from parallel_backend.rank.comm.interfaces import check_named, interface_towards, interface_with, loopback_interface

ROOT = Path(__file__).resolve().parents[2]
WINDOWS = {
    "Ethernet 2": [(-1, "AA-BB-CC-DD-EE-FF"), (socket.AF_INET, "192.168.0.5"), (socket.AF_INET6, "fe80::1")],
    "vEthernet (WSL)": [(socket.AF_INET, "172.20.0.1")],
    "Loopback Pseudo-Interface 1": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
}


@pytest.fixture
def on_windows(monkeypatch):
    found = {name: [SimpleNamespace(family=f, address=a) for f, a in all_of] for name, all_of in WINDOWS.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(found, SimpleNamespace(isup=True)))
    monkeypatch.setattr(sys, "platform", "win32")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="this system's own names")
def test_interfaces_of_this_machine():
    assert loopback_interface() == interface_towards(("127.0.0.1", 1)) == "lo"
    assert interface_with("203.0.113.7") is None  # an address for documents


def test_interfaces_as_windows_calls_them(on_windows):
    assert loopback_interface() == "Loopback Pseudo-Interface 1"
    assert interface_with("192.168.0.5") == "Ethernet 2"
    assert interface_towards(("127.0.0.1", 1)) == "Loopback Pseudo-Interface 1"


@pytest.fixture
def joining(monkeypatch):
    """`joining()`: joins a group that is not made; what it was asked for."""
    made = []
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *a, **k: made.append((a, k)))
    for name in process_group.INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "removed by the next line")
        monkeypatch.delenv(name)

    def join():
        process_group.join(0, ("cpu", "cpu"), SimpleNamespace(address=None, store=None), timedelta(seconds=1))
        return made

    return join


@pytest.mark.skipif(sys.platform != "linux", reason="this system's own names")
@pytest.mark.parametrize("given", [None, "eth7"])
def test_both_libraries_are_told_to_stay_on_loopback_unless_the_user_has_chosen(joining, monkeypatch, given):
    monkeypatch.setattr(process_group, "check_named", lambda *_: None)
    for name in process_group.INTERFACE_VARIABLES if given else ():
        monkeypatch.setenv(name, given)
    joining()
    told = [os.environ[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")]
    assert told == ([given, given] if given else ["lo", "=lo"])


def test_without_a_loopback_interface_nothing_listens_elsewhere(on_windows, joining, monkeypatch):
    del on_windows["Loopback Pseudo-Interface 1"]
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1.*GLOO_SOCKET_IFNAME"):
        joining()
    for name in process_group.INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "Ethernet 2")  # the user's own choice
    assert joining()


def test_a_loopback_interface_that_is_off_is_named(on_windows, joining, monkeypatch):
    """Ranks would wait for each other for minutes: it keeps its address."""
    off = {name: SimpleNamespace(isup="Loopback" not in name) for name in on_windows}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: off)
    with pytest.raises(RuntimeError, match=r"Loopback Pseudo-Interface 1, by which .* is switched off"):
        joining()


def test_an_interface_that_does_not_exist_is_named_with_its_variable():
    """Gloo's own error has neither."""
    loopback = loopback_interface()
    check_named("GLOO_SOCKET_IFNAME", loopback)
    with pytest.raises(RuntimeError, match=f"^GLOO_SOCKET_IFNAME is '{loopback},gone0' .* no network interface gone0. Set"):
        check_named("GLOO_SOCKET_IFNAME", f"{loopback},gone0")
