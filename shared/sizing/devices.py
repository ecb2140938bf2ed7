"""Devices as plain numbers: their rates, their memory, and how they reach each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuShape:
    """One GPU, or any other device; the efficiencies are the shares of its limits that a good engine reaches."""

    flops: float  # dense 16 bit, 1/s
    bandwidth: float  # bytes/s
    memory_bytes: float
    link: float  # network, bytes/s
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    link_efficiency: float = 0.8
    peer: float = 0.0  # to the other devices of its machine, bytes/s in each direction; 0 = over the network
    latency_s: float = 10e-6  # of one exchange between ranks, however short: assumed, not measured


H200 = GpuShape(flops=790e12, bandwidth=4.3e12, memory_bytes=141e9, link=50e9, peer=450e9)
"""Measured rates: a large bf16 product, a device copy; one 400 Gb/s network card for each GPU."""
GPUS = {
    "A100-40GB": GpuShape(flops=312e12, bandwidth=1.56e12, memory_bytes=40e9, link=25e9, peer=300e9),
    "A100": GpuShape(flops=312e12, bandwidth=2.04e12, memory_bytes=80e9, link=25e9, peer=300e9),
    "L40S": GpuShape(flops=362e12, bandwidth=0.86e12, memory_bytes=48e9, link=25e9, peer=32e9),
    "H100": GpuShape(flops=790e12, bandwidth=3.35e12, memory_bytes=80e9, link=50e9, peer=450e9),
    "H200": H200,
    "B200": GpuShape(flops=2250e12, bandwidth=8.0e12, memory_bytes=180e9, link=50e9, peer=900e9),
    "MI300X": GpuShape(flops=1307e12, bandwidth=5.3e12, memory_bytes=192e9, link=50e9, peer=448e9),
}
"""H200's rates (and H100's compute) are measured, all others are the data sheets': real ones are lower. So are all
rates between the GPUs of a machine."""

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_OWN = {"memory": "memory_bytes", "bandwidth": "bandwidth", "flops": "flops", "link": "link", "peer": "peer"}
_DEFAULT_LINK = 1.25e9
_MOST = 1e18


def gpu_of(name: str, option: str) -> GpuShape:
    """The GPU of that name, in any case, or one in numbers: `memory=24G,bandwidth=60G,flops=900G`, with `link` and
    `peer` where they are known. Raises ConfigError (`option`)."""
    for known, shape in GPUS.items():
        if known.lower() == name.strip().lower():
            return shape
    if "=" in name:
        return _own(name, option)
    raise ConfigError(
        f"--{option}: no GPU {name!r}; known: {', '.join(GPUS)}, or memory=…,bandwidth=…,flops=…",
        field=option,
        value=name,
    )


def device_name(name: str) -> str:
    """As the answer shows it."""
    return "device" if "=" in name else name.strip().upper()


def _own(text: str, option: str) -> GpuShape:
    values: dict[str, float] = {"link": _DEFAULT_LINK}
    named: set[str] = set()
    for part in text.split(","):
        name, _, number = (each.strip() for each in part.partition("="))
        if name not in _OWN or name in named:
            raise ConfigError(
                f"--{option}: {name!r} is not one of {', '.join(_OWN)}, once each", field=option, value=text
            )
        named.add(name)
        values[_OWN[name]] = _rate(number, name, option)
    if missing := [name for name in ("memory", "bandwidth", "flops") if name not in named]:
        raise ConfigError(f"--{option}: {', '.join(missing)} missing in {text!r}", field=option, value=text)
    return GpuShape(**values)


def _rate(number: str, name: str, option: str) -> float:
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        value = float(number.removesuffix(unit)) * _UNITS[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value <= _MOST:  # also false for NaN
        raise ConfigError(
            f"--{option}: {name} must be a number above 0 such as 24G or 1.5T, got {number!r}",
            field=option,
            limit=_MOST,
        )
    return value
