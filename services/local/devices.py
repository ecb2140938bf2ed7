"""Which device each worker of a local cluster gets, and how much of a GPU's memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError

CPU = "cpu"
_ACCEPTED = re.compile(r"cpu|cuda|cuda:\d+(,\d+)*")
_NUM_DIGITS = 4


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """One worker's part."""

    device: str
    gpu_memory: float
    """Share of the whole GPU's memory; 0 on the CPU."""


ON_CPU = DeviceShare(CPU, 0.0)


def parse_devices(text: str) -> tuple[str, ...]:
    """The devices of `cpu`, `cuda` (the first GPU) or `cuda:0,1,…`. Raises ConfigError."""
    if _ACCEPTED.fullmatch(text) is None:
        raise ConfigError(
            f"device must be cpu, cuda, or cuda: and the GPUs' numbers, such as cuda:0,1, got {text!r}", field="device"
        )
    name, _, numbers = text.partition(":")
    if not numbers:
        return (CPU,) if name == CPU else ("cuda:0",)
    devices = tuple(f"{name}:{int(number)}" for number in numbers.split(","))
    twice = [device for device, count in Counter(devices).items() if count > 1]
    if twice:
        raise ConfigError(f"device names {twice[0]} twice in {text!r}", field="device")
    return devices


def share_devices(devices: Sequence[str], num_workers: int, gpu_memory: float) -> list[DeviceShare]:
    """A device for each worker, in turn; those on one GPU divide `gpu_memory` of it evenly.

    So with two GPUs, one prefill and one decode worker have a GPU each.
    """
    dealt = [devices[number % len(devices)] for number in range(num_workers)]
    on_device = Counter(dealt)
    unit = 10**_NUM_DIGITS  # rounded down: shares never add up to more
    return [
        ON_CPU if device == CPU else DeviceShare(device, int(gpu_memory / on_device[device] * unit) / unit)
        for device in dealt
    ]
