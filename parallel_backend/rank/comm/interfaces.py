"""Finds the names of network interfaces, because Gloo and NCCL take the name of the interface to listen on."""

import socket

import psutil

LOOPBACK = "127.0.0.1"


def interface_with(address: str) -> str | None:
    """Return the interface that has this IPv4 address. None: no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return name
    return None


def check_named(variable: str, value: str) -> None:
    """Raise RuntimeError if an environment variable names an interface that does not exist. Commas separate names."""
    known = psutil.net_if_addrs()
    if missing := [name for name in value.split(",") if name not in known]:
        raise RuntimeError(
            f"{variable} is '{value}' in ComfyUI's environment, and this machine has no network interface {missing[0]}. Set "
            f"{variable} to one of {', '.join(sorted(known))}, or remove it, and restart ComfyUI"
        )


def interface_towards(address: tuple[str, int]) -> str | None:
    """Return the interface by which this machine reaches an IPv4 address. None if it cannot be found out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket sends nothing here, it only picks its route
        return interface_with(probe.getsockname()[0])


def loopback_interface() -> str:
    """Return the interface that only this machine reaches, such as lo, or "Loopback Pseudo-Interface 1" on Windows.

    Raises RuntimeError if there is none. Without a name, other machines could reach the ranks: Gloo would listen on the
    address of the host name, NCCL on the first interface that is not loopback. Raises RuntimeError also if the interface is
    switched off: it keeps its address, and ranks would wait for each other for minutes.
    """
    name = interface_with(LOOPBACK)
    if name is not None and not psutil.net_if_stats()[name].isup:
        raise RuntimeError(
            f"the network interface {name}, by which this machine's ranks reach each other, is switched off. Switch it on "
            f"(on Linux: ip link set {name} up)"
        )
    if name is None:
        raise RuntimeError(
            f"no network interface of this machine has the address {LOOPBACK}, by which its ranks find each other. Name "
            "one in GLOO_SOCKET_IFNAME before ComfyUI starts. Other machines on that network can then reach the ranks"
        )
    return name
