"""RDMA devices: are there any, are their ports up, and may this process open and use them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from services.preflight.finding import Finding, fail, ok, warn
from services.preflight.machine import UNLIMITED, Machine, names_in, read
from shared.sizes import size

CHECK = "rdma"
MEMLOCK_CHECK = "memlock"
_RATE = re.compile(r"([\d.]+) Gb/sec")
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_EFA = "efa"

_ASK_FOR_DEVICES = (
    "request the RDMA resource of your device plugin in the pool's resources (rdma/…, nvidia.com/…, "
    "vpc.amazonaws.com/efa), and see that a node offers it: kubectl describe node"
)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device."""

    device: str
    number: int
    fabric: str
    """InfiniBand, RoCE or EFA."""
    state: str
    """ACTIVE, DOWN, INIT, …"""
    gigabits: float
    """Rate of the link; 0 = unknown."""
    has_gid: bool
    """Whether it has an address that a RoCE connection can use; True elsewhere."""

    @property
    def usable(self) -> bool:
        """Whether a connection can be made through it."""
        return self.state == "ACTIVE" and self.has_gid

    def __str__(self) -> str:
        rate = f" {self.gigabits:g} Gb/s" if self.gigabits else ""
        return f"{self.device}:{self.number} {self.fabric}{rate} {self.state}"


def rdma_ports(machine: Machine) -> list[RdmaPort]:
    """All ports of all devices that this machine shows."""
    devices = machine.path("/sys/class/infiniband")
    return [
        _port(devices / device, int(number))
        for device in names_in(devices)
        for number in names_in(devices / device / "ports")
        if number.isdecimal()
    ]


def check_rdma(machine: Machine, *, required: bool) -> list[Finding]:
    """`required`: no usable port is a failure; else blocks travel over TCP, or within the host."""
    ports = rdma_ports(machine)
    shown = ", ".join(map(str, ports))
    usable = [port for port in ports if port.usable]
    problem = fail if required else warn
    if not ports:
        text = "no RDMA device: blocks travel over TCP between hosts"
        return [fail(CHECK, text, _ASK_FOR_DEVICES) if required else ok(CHECK, text)]
    if not usable:
        return [problem(CHECK, f"no usable port: {shown}", _why_unusable(ports))]
    closed = [path for path in _device_files(machine, {port.device for port in usable}) if not _may_open(path)]
    if closed:
        files = ", ".join(str(path) for path in closed)
        return [problem(CHECK, f"{shown}; but {files} cannot be opened", _ASK_FOR_DEVICES)]
    return [ok(CHECK, shown)]


def check_memlock(machine: Machine, limit_bytes: int) -> Finding:
    """RDMA pins the memory that it writes to; the kernel counts it against RLIMIT_MEMLOCK, unless IPC_LOCK is held."""
    shown = "unlimited" if limit_bytes == UNLIMITED else size(limit_bytes)
    if limit_bytes == UNLIMITED or machine.may_lock_memory():
        held = " (IPC_LOCK is held)" if machine.may_lock_memory() else ""
        return ok(MEMLOCK_CHECK, f"memory that may be locked: {shown}{held}")
    text = f"memory that may be locked: {shown}, and no IPC_LOCK"
    if any(port.usable for port in rdma_ports(machine)):
        return fail(
            MEMLOCK_CHECK,
            f"{text}: the KV pool cannot be registered with the RDMA device",
            "let the container runtime set no limit (containerd: LimitMEMLOCK=infinity); IPC_LOCK in "
            "capabilities.add reaches the processes of root alone",
        )
    return ok(MEMLOCK_CHECK, f"{text}; enough without RDMA")


def _port(device: Path, number: int) -> RdmaPort:
    port = device / "ports" / str(number)
    layer = read(port / "link_layer")
    is_efa = (device / "device/driver").exists() and os.path.realpath(device / "device/driver").endswith(f"/{_EFA}")
    fabric = "EFA" if is_efa else {"Ethernet": "RoCE"}.get(layer, layer or "unknown")
    rate = _RATE.match(read(port / "rate"))
    gids = [read(port / "gids" / name) for name in names_in(port / "gids")]
    return RdmaPort(
        device=device.name,
        number=number,
        fabric=fabric,
        state=read(port / "state").rpartition(": ")[2] or "unknown",
        gigabits=float(rate.group(1)) if rate else 0.0,
        has_gid=fabric != "RoCE" or any(gid and gid != _NO_GID for gid in gids),
    )


def _why_unusable(ports: list[RdmaPort]) -> str:
    if any(port.state == "ACTIVE" for port in ports):
        return (
            "the port has no address in this network namespace: attach the device's network to the Pod "
            "(SR-IOV or macvlan with RDMA CNI), or use hostNetwork"
        )
    return "bring the link up: cable, switch port, subnet manager (InfiniBand: ibstat on the node)"


def _device_files(machine: Machine, devices: set[str]) -> list[Path]:
    """The /dev/infiniband/uverbs* of these devices."""
    verbs = machine.path("/sys/class/infiniband_verbs")
    return [
        machine.path(f"/dev/infiniband/{name}") for name in names_in(verbs) if read(verbs / name / "ibdev") in devices
    ]


def _may_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)
