"""The GPU that a worker computes on: device files, driver library, CUDA versions, a first computation."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.preflight.finding import Finding, fail, ok, warn
from services.preflight.machine import Machine, names_in
from shared.sizes import size

CHECK, CUDA_CHECK = "gpu", "cuda"
DRIVER_LIBRARY = "libcuda.so.1"
BUSY_SHARE = 0.9
"""Below this share of free memory another process is on the GPU."""
_VERSION = re.compile(r"\d{3}\.\d+(?:\.\d+)?")
_ASK_FOR_GPU = (
    "request a GPU in the pool's resources (nvidia.com/gpu: 1, amd.com/gpu: 1, or a DRA claim), and see that a node "
    "offers one: kubectl describe node. For workers on the CPU set device: cpu"
)
_ASK_FOR_LIBRARY = (
    "let the container runtime put the driver into the container: NVIDIA's container toolkit, or the GPU Operator, and "
    "the pool's runtimeClassName"
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that works."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """GPUs and versions as the driver's library reports them."""

    version: tuple[int, int]
    """The newest CUDA that it runs."""
    num_gpus: int


def has_device_files(machine: Machine) -> bool:
    """Whether a GPU of a known maker is in this container."""
    names = names_in(machine.path("/dev"))
    return any(re.fullmatch(r"nvidia\d+|kfd|dxg", name) for name in names)


def kernel_driver(machine: Machine) -> str:
    """Version of NVIDIA's kernel module; empty where none is loaded."""
    found = _VERSION.search(machine.text("/proc/driver/nvidia/version"))
    return found.group() if found else ""


def check_gpu(
    machine: Machine, device: str, load: Callable[[str], Any] = ctypes.CDLL
) -> tuple[list[Finding], Gpu | None]:
    """For a worker of that `device`: cpu, cuda or cuda:N. Looks from the bottom up, and stops at the first thing that
    is missing. Blocking: it may import torch."""
    if device == "cpu":
        there = has_device_files(machine)
        return [
            ok(CHECK, f"not used: device is cpu, {'though a GPU is here' if there else 'and no GPU is here'}")
        ], None
    if not has_device_files(machine):
        return [fail(CHECK, f"device is {device}, but no GPU is in this container", _ASK_FOR_GPU)], None
    if not machine.path("/dev/kfd").exists():
        try:
            driver = cuda_driver(load)
        except (OSError, RuntimeError) as error:
            return [fail(CHECK, f"a GPU is here, but its driver cannot be used: {error}", _ASK_FOR_LIBRARY)], None
        finding = check_versions(driver.version, _torch_cuda(), kernel_driver(machine))
        if finding.fix:
            return [finding], None
        findings = [finding]
    else:
        findings = [_check_rocm()]
        if findings[0].fix:
            return findings, None
    finding, gpu = compute_on(device)
    return [*findings, finding], gpu


def cuda_driver(load: Callable[[str], Any] = ctypes.CDLL) -> CudaDriver:
    """Asks the driver's library. Raises OSError where there is none, RuntimeError where it refuses."""
    library = load(DRIVER_LIBRARY)
    if status := library.cuInit(0):
        message = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(message))
        raise RuntimeError(f"cuInit: {(message.value or b'').decode() or f'error {status}'}")
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    return CudaDriver((version.value // 1000, version.value % 1000 // 10), count.value)


def check_versions(driver: tuple[int, int], torch_cuda: str | None, kernel: str) -> Finding:
    """Whether a driver for CUDA `driver` runs a torch built for `torch_cuda`, such as "13.0"; None = for none.

    A driver runs everything of its own major version and of older ones.
    """
    shown = f"driver {kernel or 'of unknown version'} runs CUDA {driver[0]}.{driver[1]}"
    if torch_cuda is None:
        return fail(
            CUDA_CHECK,
            f"{shown}, but this torch is built without CUDA",
            "use the image's CUDA variant (image.variant: cuda)",
        )
    if int(torch_cuda.split(".")[0]) > driver[0]:
        return fail(
            CUDA_CHECK,
            f"{shown}, but torch is built for CUDA {torch_cuda}",
            f"update the node's driver to one for CUDA {torch_cuda.split('.')[0]}, or use an image built for CUDA "
            f"{driver[0]}",
        )
    return ok(CUDA_CHECK, f"{shown}, torch is built for CUDA {torch_cuda}")


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _check_rocm() -> Finding:
    import torch

    if torch.version.hip is None:
        return fail(CUDA_CHECK, "an AMD GPU is here, but this torch is built without ROCm", "use an image with ROCm")
    return ok(CUDA_CHECK, f"torch is built for ROCm {torch.version.hip}")


def compute_on(device: str) -> tuple[Finding, Gpu | None]:
    """Adds two numbers there. Blocking: imports torch."""
    import torch

    try:
        place = torch.device(device)
        properties = torch.cuda.get_device_properties(place)
        assert int(torch.ones(2, device=place).sum()) == 2
        free, total = torch.cuda.mem_get_info(place)
    except (RuntimeError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), "1 and 1 are not 2")
        return fail(CHECK, f"{device} does not compute: {reason}", _ASK_FOR_GPU), None
    gpu = Gpu(properties.name, free, total)
    text = f"{device} is {gpu.name}, {size(free)} of {size(total)} free"
    if free < BUSY_SHARE * total:
        return warn(CHECK, f"{text}: another process is on it", "end it, or lower gpu_memory by its share"), gpu
    return ok(CHECK, text), gpu
