"""What launchers ask of the device."""

from __future__ import annotations

import torch

CPU_PROGRAMS = 8  # stands in for multiprocessors where kernels are interpreted


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small number on the CPU."""
    if device.type != "cuda":
        return CPU_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, for `value >= 1`: the sizes that tiles come in."""
    return 1 << (value - 1).bit_length()
