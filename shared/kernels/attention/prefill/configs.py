"""Which sizes prefill attention is compiled for on which device: numbers alone, no tensors.

The sizes of 16-bit queries spill no register, or few bytes, and their tiles fit the shared memory, by compilation ahead
of time for each of these devices (`tests/unit/kernels/test_triton_compiles.py`). Those of compute capability 9.0 were
timed on an H200, the others on no hardware yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.kernels.device import DeviceLimits


@dataclass(frozen=True)
class PrefillConfig:
    """Sizes that a launch is compiled for."""

    rows: int  # query heads times tokens of one tile
    tile: int  # keys of one step
    num_warps: int
    num_stages: int  # tiles of keys in flight


@dataclass(frozen=True)
class DeviceConfigs:
    """The sizes for one kind of device."""

    shared_bytes: int  # that a program must be able to take
    long: PrefillConfig  # many rows, heads of at most 128 dims
    short: PrefillConfig  # 64 rows or fewer
    wide: PrefillConfig  # heads of more than 128 dims
    wide_short: PrefillConfig


SHORT_ROWS = 64

NVIDIA = (
    DeviceConfigs(  # 9.0, 10.0: wgmma and tcgen05
        227 * 1024,
        long=PrefillConfig(128, 64, 8, 3),
        short=PrefillConfig(64, 64, 4, 3),
        wide=PrefillConfig(128, 64, 8, 2),
        wide_short=PrefillConfig(64, 32, 4, 3),
    ),
    DeviceConfigs(  # 8.0: mma.sync, accumulators of 64 keys fit eight warps
        163 * 1024,
        long=PrefillConfig(128, 64, 8, 3),
        short=PrefillConfig(64, 32, 4, 3),
        wide=PrefillConfig(64, 32, 8, 2),
        wide_short=PrefillConfig(64, 32, 8, 2),
    ),
    DeviceConfigs(  # 8.6, 8.9, 12.0
        99 * 1024,
        long=PrefillConfig(128, 32, 8, 3),
        short=PrefillConfig(64, 32, 4, 3),
        wide=PrefillConfig(64, 32, 8, 2),
        wide_short=PrefillConfig(64, 32, 8, 2),
    ),
)
"""Sizes in the order of falling need of shared memory."""

AMD = DeviceConfigs(  # gfx942: warps of 64 lanes
    64 * 1024,
    long=PrefillConfig(128, 32, 4, 2),
    short=PrefillConfig(64, 32, 4, 2),
    wide=PrefillConfig(64, 32, 8, 2),
    wide_short=PrefillConfig(64, 32, 8, 2),
)

FLOAT32 = PrefillConfig(rows=32, tile=16, num_warps=4, num_stages=2)
"""Sizes for fp32, for tests of exactness only: no matrix unit computes at fp32's full precision."""


def refusal(limits: DeviceLimits) -> str | None:
    """Why no sizes fit the device, or None."""
    least = _candidates(limits)[-1].shared_bytes
    if limits.shared_bytes >= least:
        return None
    return f"a program may take {limits.shared_bytes} bytes of shared memory, Triton's attention needs {least}"


def prefill_config(head_dim: int, element_bytes: int, max_rows: int, limits: DeviceLimits) -> PrefillConfig:
    """The first sizes that fit the device's registers and shared memory.

    Args:
        head_dim: of a head.
        element_bytes: 2, or 4 for fp32.
        max_rows: query heads times tokens of the batch's longest chunk for one KV head.
        limits: of the device; `refusal` has none.
    """
    is_wide = head_dim > 128
    if element_bytes == 4:
        return FLOAT32
    configs = next(c for c in _candidates(limits) if c.shared_bytes <= limits.shared_bytes)
    if max_rows <= SHORT_ROWS:
        return configs.wide_short if is_wide else configs.short
    return configs.wide if is_wide else configs.long


def _candidates(limits: DeviceLimits) -> tuple[DeviceConfigs, ...]:
    return (AMD,) if limits.arch.startswith("gfx") else NVIDIA
