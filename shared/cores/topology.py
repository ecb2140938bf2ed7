"""A machine's processors as Linux describes them below /sys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SLOW = 0.75
"""A core whose clock or capacity is below this share of the fastest one's is a slow one: efficiency cores are at 0.3 to
0.7 of it, while cores of one kind differ by less than a tenth."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """One CPU as Linux numbers them: a hardware thread of a core."""

    number: int
    core: int
    """The lowest CPU number of its core: hardware threads of one core have the same."""
    node: int = 0
    """Number of the NUMA node whose memory is near."""
    is_fast: bool = True
    """False for the efficiency cores of a hybrid processor."""


@dataclass(frozen=True, slots=True)
class Topology:
    """All CPUs that are online, by number."""

    cpus: tuple[Cpu, ...]
    free_bytes: Mapping[int, int] = field(default_factory=dict)
    """Free memory of each NUMA node; empty where Linux does not say."""

    def restricted(self, allowed: Iterable[int]) -> tuple[Cpu, ...]:
        """The CPUs among `allowed`; those that the machine does not describe are cores of their own."""
        known = {cpu.number: cpu for cpu in self.cpus}
        return tuple(known.get(number, Cpu(number, number)) for number in sorted(allowed))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers in `0-3,8`, in order; raises ValueError for another text."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        if (match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)) is None:
            raise ValueError(f"{part!r} is neither a CPU's number nor a range such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} ends before it begins")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """`0-3,8`: the text that `parse_cpu_list` reads."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def read_topology(root: Path = Path("/")) -> Topology:
    """What is below `root`/sys/devices; a machine that says nothing has no CPUs in it. Raises nothing."""
    devices = root / "sys/devices"
    online = _list(devices / "system/cpu/online")
    nodes = {cpu: number for number, cpus in _nodes(devices) for cpu in cpus}
    fast = _fast(devices, online)
    cpus = []
    for number in online:
        topology = devices / f"system/cpu/cpu{number}/topology"
        siblings = _list(topology / "core_cpus_list") or _list(topology / "thread_siblings_list")
        cpus.append(Cpu(number, min((number, *siblings)), nodes.get(number, 0), number in fast))
    free = {number: free for number, _ in _nodes(devices) if (free := _free_bytes(devices, number)) is not None}
    return Topology(tuple(cpus), free)


def _nodes(devices: Path) -> list[tuple[int, tuple[int, ...]]]:
    """Number and CPUs of each NUMA node."""
    online = _list(devices / "system/node/online")
    return [(number, _list(devices / f"system/node/node{number}/cpulist")) for number in online]


def _fast(devices: Path, online: Iterable[int]) -> set[int]:
    """The fast cores, by the kernel's own list on Intel's hybrid processors, else by capacity (ARM) or highest
    clock."""
    all_cpus = set(online)
    performance = all_cpus.intersection(_list(devices / "cpu_core/cpus"))
    if performance:
        return performance
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        values = {cpu: value for cpu in all_cpus if (value := _number(devices / f"system/cpu/cpu{cpu}" / name))}
        if len(values) == len(all_cpus) and len(set(values.values())) > 1:
            return {cpu for cpu, value in values.items() if value >= SLOW * max(values.values())}
    return all_cpus


def _free_bytes(devices: Path, node: int) -> int | None:
    match = re.search(r"MemFree:\s+(\d+) kB", _text(devices / f"system/node/node{node}/meminfo"))
    return int(match[1]) * 1024 if match is not None else None


def _list(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpu_list(_text(path))
    except ValueError:
        return ()


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
