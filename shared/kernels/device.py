"""Properties of the device that launchers need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of a device by which kernels are compiled and their grids cut."""

    arch: str
    """`sm_90` for compute capability 9.0, `gfx942`, or empty where kernels are interpreted."""
    shared_bytes: int
    """Shared memory that one program may take."""
    num_multiprocessors: int


INTERPRETER = DeviceLimits("", shared_bytes=227 * 1024, num_multiprocessors=8)
"""Stands in for a device where kernels are interpreted."""


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA or ROCm device; `INTERPRETER` on the CPU. Kept: launchers ask for each kernel of a step."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.partition(":")[0]
        return DeviceLimits(arch, properties.shared_memory_per_block, properties.multi_processor_count)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined, unused-ignore]
    return DeviceLimits(f"sm_{properties.major}{properties.minor}", shared_bytes, properties.multi_processor_count)


OVERLAPPED = {"OVERLAPS": True, "launch_pdl": True}
APART = {"OVERLAPS": False}


def overlap(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch whose kernel calls `await_kernels_before`: it begins while the one before ends, where the
    device can do that."""
    arch = device_limits(device).arch
    return OVERLAPPED if arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90 else APART


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, for `value >= 1`: the sizes that tiles come in."""
    return 1 << (value - 1).bit_length()
