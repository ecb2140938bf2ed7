"""RDMA devices in written /sys and /dev trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.preflight.finding import Level
from services.preflight.machine import UNLIMITED, Machine
from services.preflight.rdma import check_memlock, check_rdma, rdma_ports
from tests.unit.preflight.trees import add, add_rdma_device

IPC_LOCK = "CapEff:\t0000000000004000"
NO_CAPABILITY = "CapEff:\t0000000000000000"


@pytest.mark.parametrize(
    ("layer", "driver", "rate", "shown"),
    [
        ("InfiniBand", "mlx5_core", "400 Gb/sec (4X NDR)", "mlx5_0:1 InfiniBand 400 Gb/s ACTIVE"),
        ("Ethernet", "mlx5_core", "200 Gb/sec (4X HDR)", "mlx5_0:1 RoCE 200 Gb/s ACTIVE"),
        ("Unspecified", "efa", "100 Gb/sec (4X EDR)", "mlx5_0:1 EFA 100 Gb/s ACTIVE"),
    ],
)
def test_each_fabric_is_named_with_its_rate(tmp_path: Path, layer: str, driver: str, rate: str, shown: str) -> None:
    add_rdma_device(tmp_path, layer=layer, driver=driver, rate=rate)
    [finding] = check_rdma(Machine(tmp_path), required=True)
    assert (finding.level, finding.text) == (Level.OK, shown)


@pytest.mark.parametrize(("required", "level"), [(True, Level.FAIL), (False, Level.OK)])
def test_no_device_is_a_failure_only_where_rdma_is_required(tmp_path: Path, required: bool, level: Level) -> None:
    [finding] = check_rdma(Machine(tmp_path), required=required)
    assert finding.level is level
    assert "no RDMA device" in finding.text
    assert ("rdma/" in finding.fix) is required


def test_a_link_that_is_down_names_the_cable(tmp_path: Path) -> None:
    add_rdma_device(tmp_path, state="1: DOWN")
    [finding] = check_rdma(Machine(tmp_path), required=True)
    assert finding.level is Level.FAIL
    assert "mlx5_0:1 InfiniBand 400 Gb/s DOWN" in finding.text
    assert "cable" in finding.fix


def test_one_port_that_is_up_is_enough(tmp_path: Path) -> None:
    add_rdma_device(tmp_path, "mlx5_0", state="1: DOWN", uverbs="uverbs0")
    add_rdma_device(tmp_path, "mlx5_1", uverbs="uverbs1")
    [finding] = check_rdma(Machine(tmp_path), required=True)
    assert finding.level is Level.OK


def test_roce_without_an_address_in_the_pods_network_is_found(tmp_path: Path) -> None:
    add_rdma_device(tmp_path, layer="Ethernet", gid="0000:0000:0000:0000:0000:0000:0000:0000")
    [finding] = check_rdma(Machine(tmp_path), required=True)
    assert finding.level is Level.FAIL
    assert "network namespace" in finding.fix


def test_a_device_whose_file_is_not_in_the_container_is_found(tmp_path: Path) -> None:
    add_rdma_device(tmp_path)
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    [finding] = check_rdma(Machine(tmp_path), required=False)
    assert finding.level is Level.WARN
    assert "uverbs0 cannot be opened" in finding.text


def test_a_limit_on_locked_memory_fails_with_rdma_alone(tmp_path: Path) -> None:
    add(tmp_path, "/proc/self/status", NO_CAPABILITY)
    machine = Machine(tmp_path)
    assert check_memlock(machine, 8 << 20).level is Level.OK
    add_rdma_device(tmp_path)
    finding = check_memlock(machine, 8 << 20)
    assert finding.level is Level.FAIL
    assert "8.0 MiB" in finding.text
    assert "LimitMEMLOCK" in finding.fix
    assert check_memlock(machine, UNLIMITED).level is Level.OK


def test_ipc_lock_in_effect_lifts_the_limit(tmp_path: Path) -> None:
    add_rdma_device(tmp_path)
    add(tmp_path, "/proc/self/status", IPC_LOCK)
    assert check_memlock(Machine(tmp_path), 8 << 20).level is Level.OK


def test_files_that_are_no_numbers_do_not_stop_it(tmp_path: Path) -> None:
    add_rdma_device(tmp_path, rate="?", state="")
    [port] = rdma_ports(Machine(tmp_path))
    assert (port.gigabits, port.state, port.usable) == (0.0, "unknown", False)
