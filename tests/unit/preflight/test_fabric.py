"""The preflight's checks of GPUs, RDMA and UCX."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from services.preflight.finding import Level
from services.preflight.gpu import check_gpu, check_versions, compute_on, cuda_driver, kernel_driver
from services.preflight.machine import UNLIMITED, Machine
from services.preflight.rdma import check_memlock, check_rdma, rdma_ports
from services.preflight.ucx import Ucx, judge
from services.preflight.ucx_resources import parse
from tests.unit.preflight.trees import add, add_rdma_device

NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)"


def test_a_worker_on_the_cpu_needs_none(tmp_path: Path) -> None:
    [finding], gpu = check_gpu(Machine(tmp_path), "cpu")
    assert (finding.level, gpu) == (Level.OK, None)
    assert "no GPU is here" in finding.text
    add(tmp_path, "/dev/nvidia0", "")
    [finding], _ = check_gpu(Machine(tmp_path), "cpu")
    assert "though a GPU is here" in finding.text


def test_a_container_without_a_gpu_says_what_to_request(tmp_path: Path) -> None:
    [finding], gpu = check_gpu(Machine(tmp_path), "cuda")
    assert (finding.level, gpu) == (Level.FAIL, None)
    assert "nvidia.com/gpu" in finding.fix


def test_a_gpu_without_a_driver_library_names_the_container_toolkit(tmp_path: Path) -> None:
    add(tmp_path, "/dev/nvidia0", "")

    def load(name: str) -> ctypes.CDLL:
        return ctypes.CDLL(f"{name}.that-is-nowhere")  # also where a driver is installed

    [finding], gpu = check_gpu(Machine(tmp_path), "cuda:0", load)
    assert (finding.level, gpu) == (Level.FAIL, None)
    assert "libcuda.so.1" in finding.text
    assert "container toolkit" in finding.fix


def test_a_driver_that_refuses_is_quoted() -> None:
    class Refusing:
        def cuInit(self, flags: int) -> int:  # noqa: N802 - the library's name
            return 803

        def cuGetErrorString(self, status: int, message: object) -> int:  # noqa: N802
            return 1  # it has no text for it

    with pytest.raises(RuntimeError, match="error 803"):
        cuda_driver(lambda name: Refusing())


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "level", "says"),
    [
        ((13, 0), "13.0", Level.OK, "runs CUDA 13.0"),
        ((13, 0), "12.8", Level.OK, "torch is built for CUDA 12.8"),
        ((13, 0), "13.2", Level.OK, "torch is built for CUDA 13.2"),  # minor versions are compatible
        ((12, 8), "13.0", Level.FAIL, "update the node's driver"),
        ((13, 0), None, Level.FAIL, "built without CUDA"),
    ],
)
def test_driver_and_torch_must_match(driver: tuple[int, int], torch_cuda: str | None, level: Level, says: str) -> None:
    finding = check_versions(driver, torch_cuda, "580.65.06")
    assert finding.level is level
    assert says in f"{finding.text} {finding.fix}"


def test_a_gpu_that_computes_wrong_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: None)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.zeros(*shape))
    finding, gpu = compute_on("cuda")
    assert (finding.level, finding.text, gpu) == (Level.FAIL, "cuda does not compute: 1 and 1 are not 2", None)


def test_the_kernel_drivers_version_is_read(tmp_path: Path) -> None:
    assert kernel_driver(Machine(tmp_path)) == ""
    add(tmp_path, "/proc/driver/nvidia/version", NVRM)
    assert kernel_driver(Machine(tmp_path)) == "580.65.06"


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


INFO = """
#     component 0  :  self
#            md 1  :  component 1  tcp
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 5  :  md 4  dev 0  flags -- cma/memory
#      resource 7  :  md 5  dev 3  flags -- rc_mlx5/mlx5_0:1
"""


def test_devices_are_listed_by_transport() -> None:
    found = parse(INFO)
    assert found == {"self": ["memory"], "tcp": ["eth0", "lo"], "cma": ["memory"], "rc_mlx5": ["mlx5_0:1"]}
    assert Ucx("1.21.0", found).rdma == ["rc_mlx5"]


def test_a_ucx_that_is_too_old_is_refused() -> None:
    finding = judge(Ucx("1.18.1", {"tcp": ["eth0"], "rc_mlx5": ["a"]}), has_rdma_device=True, rdma_required=True)
    assert finding.level is Level.FAIL
    assert "1.19" in finding.fix


@pytest.mark.parametrize(
    ("transports", "device", "required", "level", "says"),
    [
        ("tcp cma", False, False, Level.OK, "tcp"),
        ("tcp cma", True, False, Level.WARN, "no RDMA transport"),
        ("tcp cma", True, True, Level.FAIL, "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"),
        ("tcp cma", False, True, Level.FAIL, "no RDMA transport"),
        ("tcp cma rc_mlx5", True, True, Level.OK, "rc_mlx5"),
        ("srd cma", True, True, Level.OK, "srd"),
        ("cma", False, False, Level.FAIL, "UCX_TLS"),
        ("tcp posix", False, False, Level.WARN, "no CMA"),
    ],
)
def test_transports_are_judged(transports: str, device: bool, required: bool, level: Level, says: str) -> None:
    ucx = Ucx("1.21.0", {name: ["eth0"] for name in transports.split()})
    finding = judge(ucx, has_rdma_device=device, rdma_required=required)
    assert finding.level is level
    assert says in f"{finding.text} {finding.fix}"
