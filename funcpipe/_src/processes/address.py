"""Which machine this is, and the address at which others reach it: that of the interface by which
it reaches them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from uuid import getnode

_ADDRESS = 0x8915
"""What Linux is asked for an interface's address by (SIOCGIFADDR)."""


def machine() -> str:
    """What tells this machine from others: its name, and what Linux draws at its start; else its
    network card's number.

    Where there is no network card each process would draw that by itself.
    """
    with suppress(OSError):
        return (
            f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
        )
    return f"{socket.gethostname()} {getnode()}"


def host_of(store: Any) -> str:
    """The host of the process that keeps a store; "" for one without a host, such as a file."""
    while not hasattr(store, "host") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "")


def connect_at(hosts: Iterable[str]) -> dict[str, str]:
    """Where gloo is to connect, in its words: at GLOO_SOCKET_IFNAME's interface, as torch's own
    groups do, or at the address towards these hosts; nothing, by which it takes that of the
    machine's name, where neither is known.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = "" if name else own_address(hosts)
    return {"interface": name} if name else {"hostname": address} if address else {}


def addresses_at(where: Mapping[str, str]) -> list[str]:
    """What `connect_at` says, as addresses of this machine: those of an interface, else the
    machine's by its name.

    Raises:
        OSError: there is no such interface.
    """
    if "hostname" in where:
        return [where["hostname"]]
    return addresses_of(where["interface"]) if where else [socket.gethostname(), "localhost"]


def addresses_of(interface: str) -> list[str]:
    """The addresses of one of this machine's interfaces, as Linux tells them. Raises OSError: there
    is none."""
    socket.if_nametoindex(interface)
    found: list[str] = []
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = import_module("fcntl").ioctl(
            asked, _ADDRESS, struct.pack("256s", interface.encode()[:15])
        )
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        found += [
            str(ip_address(bytes.fromhex(line[0])))
            for line in lines
            if line[-1] == interface
            and line[3] != "20"  # those of the link alone mean another one elsewhere
        ]
    if not found:
        raise OSError(f"the interface {interface} has no address")
    return found


def own_address(hosts: Iterable[str]) -> str:
    """The address from which this machine reaches the first of these hosts that is no name for
    itself; "" if none is.

    IPv4 goes first where a host has both: then machines with both choose alike.
    """
    return next((address for address in _ways_to(hosts) if not ip_address(address).is_loopback), "")


def own_loopback(host: str) -> str:
    """Return the loopback address by which this process reaches a host; "" if it needs a
    network."""
    ways = [*_ways_to([host])]
    return ways[0] if ways and all(ip_address(address).is_loopback for address in ways) else ""


def _ways_to(hosts: Iterable[str]) -> Iterator[str]:
    """Yield the addresses from which this machine reaches each of these hosts, IPv4 first."""
    for host in filter(None, hosts):
        with suppress(OSError):
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            for family, kind, _, _, to in sorted(found, key=lambda each: each[0] != socket.AF_INET):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(to)  # chooses a way; datagrams are not sent by it
                    yield probe.getsockname()[0]
