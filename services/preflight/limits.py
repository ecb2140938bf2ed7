"""Room in /dev/shm, disk room of the store, and ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from services.preflight.finding import Finding, fail, ok, warn
from services.preflight.machine import Machine
from shared.address import Address
from shared.errors import ConfigError
from shared.sizes import size

SHM_CHECK, DISK_CHECK, PORT_CHECK = "shm", "disk", "ports"
SHM_LEAST_BYTES = 16 << 20
"""UCX takes 4.2 MiB for each process that opens it, whether it uses it or not."""
SHM_GOOD_BYTES = 256 << 20
_MORE_SHM = (
    "mount an emptyDir with medium: Memory at /dev/shm (the chart's pools[].shmSize), or --shm-size with podman and "
    "docker"
)


def check_shm(machine: Machine) -> Finding:
    """The shared memory that UCX opens."""
    folder = machine.path("/dev/shm")
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return fail(SHM_CHECK, f"/dev/shm cannot be used: {error.strerror}", _MORE_SHM)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text = f"/dev/shm: {size(free)} of {size(total)} free"
    if not os.access(folder, os.W_OK):
        return fail(SHM_CHECK, f"{text}, but it cannot be written to", _MORE_SHM)
    if free < SHM_LEAST_BYTES:
        return fail(SHM_CHECK, f"{text}: UCX cannot open its shared memory", _MORE_SHM)
    if free < SHM_GOOD_BYTES:
        return warn(SHM_CHECK, f"{text}: enough for some ten processes", _MORE_SHM)
    return ok(SHM_CHECK, text)


def check_disk(folder: Path, wanted_bytes: int) -> Finding:
    """The folder of a store node's disk tier; what lies in it already counts as room."""
    nearest = folder
    while not os.path.exists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        return fail(
            DISK_CHECK,
            f"{nearest} is not a folder that this user ({os.getuid()}) can write to",
            "mount a volume there; fsGroup in the Pod's securityContext gives it to the group that runs the store",
        )
    free = shutil.disk_usage(nearest).free
    held = _held_bytes(folder)
    text = f"{folder}: {size(free)} free, {size(held)} in use, the tier may take {size(wanted_bytes)}"
    if free + held < wanted_bytes:
        return fail(DISK_CHECK, text, f"a volume of {size(wanted_bytes)} or more, or a smaller disk_bytes")
    return ok(DISK_CHECK, text)


def _held_bytes(folder: Path) -> int:
    """Bytes of all files in it; a store node that runs removes some meanwhile."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.stat(os.path.join(parent, name)).st_size
    return found


def check_ports(binds: Mapping[str, str]) -> Finding:
    """`binds`: host:port by the setting's name. Each is bound for a moment, unless its port is 0."""
    taken: list[str] = []
    for setting, bind in binds.items():
        try:
            address = Address.parse(bind, setting)
            _bind(address)
        except ConfigError as error:
            taken.append(error.message)
        except OSError as error:
            taken.append(f"{setting} {bind}: {error.strerror}")
    if taken:
        return fail(
            PORT_CHECK,
            "; ".join(taken),
            "end the process that listens there (ss -ltnp), or choose another port; Pods with hostNetwork share the "
            "node's ports",
        )
    return ok(PORT_CHECK, ", ".join(f"{setting} {bind}" for setting, bind in binds.items()) + ": free")


def _bind(address: Address) -> None:
    """Raises OSError where a server could not listen there."""
    if address.port == 0:
        return
    family, kind, protocol, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1)
