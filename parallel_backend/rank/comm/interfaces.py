"""Network interfaces by their addresses, as Gloo and NCCL are told by name where to listen. Alike on every system."""

import socket

import psutil

LOOPBACK = "127.0.0.1"


def interface_with(address: str) -> str | None:
    """The interface that has this IPv4 address; None where there is none."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in found):
            return name
    return None


def interface_towards(address: tuple[str, int]) -> str | None:
    """The interface by which this machine reaches an IPv4 address; None where no one interface can be named."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(address)  # sends nothing
        return interface_with(asked.getsockname()[0])


def loopback_interface() -> str:
    """The one that nobody outside of this machine reaches, such as lo, or "Loopback Pseudo-Interface 1" on Windows.

    RuntimeError where there is none: Gloo would listen on the address that the host name resolves to, NCCL on the first
    interface that is not loopback.
    """
    name = interface_with(LOOPBACK)
    if name is None:
        raise RuntimeError(
            f"no network interface of this machine has the address {LOOPBACK}, by which its ranks find each other. Name one "
            "in GLOO_SOCKET_IFNAME before ComfyUI starts: others on that interface's network can then reach the ranks"
        )
    return name
