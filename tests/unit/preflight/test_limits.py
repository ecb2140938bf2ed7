"""Shared memory, disk, ports and host memory of this machine."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from services.preflight.finding import Level
from services.preflight.limits import check_disk, check_ports, check_shm
from services.preflight.machine import Machine
from tests.unit.preflight.trees import add


def test_shared_memory_is_measured(tmp_path: Path) -> None:
    assert "free" in check_shm(Machine()).text
    missing = check_shm(Machine(tmp_path))
    assert missing.level is Level.FAIL
    assert "emptyDir" in missing.fix


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        bind = f"127.0.0.1:{listener.getsockname()[1]}"
        finding = check_ports({"http": bind, "grpc": "127.0.0.1:0"})
    assert finding.level is Level.FAIL
    assert f"http {bind}: Address already in use" in finding.text
    assert "grpc" not in finding.text
    assert check_ports({"http": bind}).level is Level.OK


def test_an_address_that_is_not_this_machines_is_a_failure() -> None:
    assert check_ports({"http": "192.0.2.1:8000"}).level is Level.FAIL
    assert check_ports({"http": "nonsense"}).level is Level.FAIL


def test_a_disk_tier_may_not_be_larger_than_its_volume(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "tier", 1 << 20).level is Level.OK
    assert check_disk(tmp_path / "tier", 1 << 60).level is Level.FAIL
    (tmp_path / "file").write_text("")
    assert check_disk(tmp_path / "file", 1).level is Level.FAIL


def test_the_cgroup_bounds_the_memory(tmp_path: Path) -> None:
    add(tmp_path, "/sys/fs/cgroup/memory.max", "1000000")
    add(tmp_path, "/sys/fs/cgroup/memory.current", "400000")
    assert Machine(tmp_path).free_memory_bytes() == 600_000
    add(tmp_path, "/sys/fs/cgroup/memory.max", "max")
    assert Machine(tmp_path).free_memory_bytes() > 1_000_000
