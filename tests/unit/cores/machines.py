"""Machines as Linux describes them: the files below /sys and /proc that are read, in its own formats."""

from __future__ import annotations

from pathlib import Path

from shared.cores.topology import format_cpu_list


class Machine:
    """A folder that is filled like the root of a file system."""

    def __init__(self, root: Path, cores: list[list[int]]) -> None:
        """`cores`: the hardware threads of each core."""
        self.root = root
        self.write("sys/devices/system/cpu/online", format_cpu_list(cpu for core in cores for cpu in core))
        for index, core in enumerate(cores):
            for cpu in core:
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", str(index))
                for name in ("core_cpus_list", "thread_siblings_list"):
                    self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", format_cpu_list(core))

    def write(self, path: str, text: str) -> None:
        """A file with one line."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def nodes(self, cpus: dict[int, str], free_kib: dict[int, int]) -> None:
        """NUMA nodes with their CPUs and free memory; one without CPUs is memory alone."""
        self.write("sys/devices/system/node/online", format_cpu_list(cpus))
        for number, of_node in cpus.items():
            self.write(f"sys/devices/system/node/node{number}/cpulist", of_node)
            lines = (
                f"\nNode {number} MemTotal:       65891024 kB\nNode {number} MemFree:        {free_kib[number]} kB"
                f"\nNode {number} MemUsed:        1891024 kB"
            )
            self.write(f"sys/devices/system/node/node{number}/meminfo", lines)

    def clocks(self, khz: dict[int, int]) -> None:
        """The highest clock of each CPU."""
        for cpu, value in khz.items():
            self.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq", str(value))


def laptop(root: Path) -> Machine:
    """Four performance cores of two threads (0-7) and eight efficiency cores (8-15), one node."""
    machine = Machine(root, [[0, 1], [2, 3], [4, 5], [6, 7], *([cpu] for cpu in range(8, 16))])
    machine.nodes({0: "0-15"}, {0: 8_000_000})
    machine.write("sys/devices/cpu_core/cpus", "0-7")
    machine.write("sys/devices/cpu_atom/cpus", "8-15")
    machine.clocks({cpu: 4_700_000 if cpu < 8 else 3_400_000 for cpu in range(16)})
    return machine


def two_sockets(root: Path, free_kib: tuple[int, int] = (50_000_000, 60_000_000)) -> Machine:
    """Two sockets of four cores, a node each, and a third node that is memory alone. As Linux numbers them: first a
    thread of each core, then their second threads."""
    machine = Machine(root, [[core, core + 8] for core in range(8)])
    machine.nodes({0: "0-3,8-11", 1: "4-7,12-15", 2: ""}, {0: free_kib[0], 1: free_kib[1], 2: 900_000_000})
    machine.clocks({cpu: 3_800_000 if cpu % 4 == 0 else 3_600_000 for cpu in range(16)})
    return machine
