"""The GPU checks, from the bottom up; the machines are written trees, the driver library's absence is real."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from services.preflight.finding import Level
from services.preflight.gpu import check_gpu, check_versions, cuda_driver, kernel_driver
from services.preflight.machine import Machine
from tests.unit.preflight.trees import add

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


def test_the_kernel_drivers_version_is_read(tmp_path: Path) -> None:
    assert kernel_driver(Machine(tmp_path)) == ""
    add(tmp_path, "/proc/driver/nvidia/version", NVRM)
    assert kernel_driver(Machine(tmp_path)) == "580.65.06"
