"""Identify this machine, and find the address at which other machines reach it.

That is the address of the interface by which this machine reaches them.
"""

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

_ADDRESS = 0x8915  # the ioctl request of Linux for an interface's address (SIOCGIFADDR)


def machine() -> str:
    """Return an id of this machine: its name with Linux's boot id, else with its network card.

    The boot id is better: without a network card, each process would draw another number.
    """
    with suppress(OSError):
        return (
            f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
        )
    return f"{socket.gethostname()} {getnode()}"


def host_of(store: Any) -> str:
    """Return the host of the process that keeps a store, or "" for a store such as a file."""
    while not hasattr(store, "host") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "")


def connect_at(hosts: Iterable[str]) -> dict[str, str]:
    """Return where this process listens for the others, in gloo's terms.

    That is the interface of GLOO_SOCKET_IFNAME, as in torch's own groups, else the address towards
    these hosts. An empty dict means the address of the machine's name.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = "" if name else own_address(hosts)
    return {"interface": name} if name else {"hostname": address} if address else {}


def addresses_at(where: Mapping[str, str]) -> list[str]:
    """Return the addresses of this machine for a result of `connect_at`.

    Raises:
        OSError: there is no such interface.
    """
    if "hostname" in where:
        return [where["hostname"]]
    return addresses_of(where["interface"]) if where else [socket.gethostname(), "localhost"]


def addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface of this machine. Raises OSError without one."""
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
            and line[3] != "20"  # not link-local addresses, which are ambiguous on other machines
        ]
    if not found:
        raise OSError(f"the interface {interface} has no address")
    return found


def own_address(hosts: Iterable[str]) -> str:
    """Return the address from which this machine reaches the first host on another machine.

    Returns "" if all hosts are this machine. IPv4 comes first, so that all machines choose alike.
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
                    probe.connect(to)  # selects a route, without sending a datagram
                    yield probe.getsockname()[0]
