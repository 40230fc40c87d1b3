"""Which network interface of this machine a run's processes meet on."""

from __future__ import annotations

import fcntl
import socket
import struct

from delta_belief_rl.types import UserError

GET_ADDRESS = 0x8915
"""The request ``SIOCGIFADDR`` of Linux: IPv4 address of an interface."""


def interfaces() -> dict[str, str]:
    """IPv4 address of every interface of this machine that has one, by its name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of(interface: str) -> str:
    """IPv4 address of an interface.

    Raises:
        UserError: This machine has no such interface, or it has no address.
    """
    known = interfaces()
    if interface not in known:
        names = ", ".join(f"{name} ({address})" for name, address in known.items())
        raise UserError(
            f"ray_init.interface={interface} is no network interface with an IPv4 address of this "
            f"machine: use one of {names or 'none, it has none'}, or null."
        )
    return known[interface]


def communication_env(interface: str) -> dict[str, str]:
    """Environment that binds NCCL and gloo to exactly this interface."""
    # Without "=" NCCL would take every interface whose name begins so.
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}


def describe(address: str) -> str:
    """An address with the name of its interface, for people."""
    names = [name for name, own in interfaces().items() if own == address]
    return f"{names[0] if names else 'unknown interface'} ({address})"
