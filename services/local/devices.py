"""Which device each worker of a local cluster gets, and how much of a GPU's memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, cycle
from pathlib import Path

from shared.errors import ConfigError

CPU = "cpu"
AUTO = "auto"
"""GPUs where this machine has some and its torch can use them, else the CPU."""
_ACCEPTED = re.compile(r"cpu|cuda|cuda:\d+(,\d+)*|timed:.+")
_NUM_DIGITS = 4


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Device of one worker and its share of the device's memory."""

    device: str
    """cpu, timed:FILE, or the GPUs of its processes: cuda:0, or cuda:0,1 for two."""
    gpu_memory: float
    """Share of each GPU's whole memory; 0 where there is none."""


ON_CPU = DeviceShare(CPU, 0.0)


def is_gpu(device: str) -> bool:
    """Whether a device that `parse_devices` gave is a GPU."""
    return device.startswith("cuda")


def parse_devices(text: str) -> tuple[str, ...]:
    """The devices of `cpu`, `timed:FILE`, `cuda` (the first GPU) or `cuda:0,1,…`. Raises ConfigError."""
    if _ACCEPTED.fullmatch(text) is None:
        raise ConfigError(
            f"device must be cpu, cuda, cuda: and the GPUs' numbers, such as cuda:0,1, or timed: and a file, "
            f"got {text!r}",
            field="device",
        )
    if not is_gpu(text):
        return (text,)
    name, _, numbers = text.partition(":")
    if not numbers:
        return ("cuda:0",)
    devices = tuple(f"{name}:{int(number)}" for number in numbers.split(","))
    twice = [device for device, count in Counter(devices).items() if count > 1]
    if twice:
        raise ConfigError(f"device names {twice[0]} twice in {text!r}", field="device")
    return devices


def found_device(num_processes: int, largest_worker: int, nodes: Path = Path("/dev")) -> str:
    """What `auto` stands for: the machine's first GPUs, at most one for each of the workers' processes; the CPU where
    there are fewer than the `largest_worker` has processes, or where torch is built without CUDA.

    Read from the names of NVIDIA's device nodes and of torch's version: importing torch takes seconds.
    """
    numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in nodes.glob("nvidia*"))
    count = sum(number is not None for number in numbers)
    try:
        is_for_cpus = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        is_for_cpus = True
    if is_for_cpus or count < largest_worker:
        return CPU
    return "cuda:" + ",".join(map(str, range(min(count, num_processes))))


def share_devices(devices: Sequence[str], ranks: Sequence[int], gpu_memory: float) -> list[DeviceShare]:
    """A share for each worker; `ranks`: the processes of each, which get a device each, in turn. Those on one GPU
    divide `gpu_memory` of it evenly.

    So with two GPUs, one prefill and one decode worker of one process have a GPU each, and those of two have both.
    """
    if not is_gpu(devices[0]):
        return [DeviceShare(devices[0], 0.0)] * len(ranks)
    turns = cycle(devices)
    dealt = [tuple(next(turns) for _ in range(count)) for count in ranks]
    on_device = Counter(chain.from_iterable(dealt))
    unit = 10**_NUM_DIGITS  # rounded down: shares never add up to more
    return [
        DeviceShare(_named(own), int(gpu_memory / max(on_device[device] for device in own) * unit) / unit)
        for own in dealt
    ]


def _named(devices: Sequence[str]) -> str:
    """The devices in the form that `parse_devices` reads."""
    return "cuda:" + ",".join(device.removeprefix("cuda:") for device in devices)
