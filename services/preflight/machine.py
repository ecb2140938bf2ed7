"""The machine as Linux shows it in /dev, /proc and /sys; tests write such trees for hardware that they lack."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

IPC_LOCK = 14
"""Number of CAP_IPC_LOCK, capabilities(7)."""
UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Machine:
    """All paths are below `root`."""

    root: Path = Path("/")

    def path(self, absolute: str) -> Path:
        """The path of `/dev/…`, `/proc/…` or `/sys/…` on this machine."""
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str:
        """A file's content without white space around it; empty where it cannot be read."""
        return read(self.path(absolute))

    def may_lock_memory(self) -> bool:
        """Whether this process has IPC_LOCK in effect: what a Pod asks for reaches a process of root alone."""
        for line in self.text("/proc/self/status").splitlines():
            name, _, value = line.partition(":")
            if name == "CapEff":
                return bool(int(value, 16) >> IPC_LOCK & 1)
        return False

    def free_memory_bytes(self) -> int:
        """Host memory that this process could still take: free, and within its cgroup's limit."""
        free = psutil.virtual_memory().available
        for limit_file, used_file in (
            ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        ):
            limit, used = self.text(limit_file), self.text(used_file)
            if limit.isdecimal() and used.isdecimal():
                free = min(free, max(0, int(limit) - int(used)))
        return free


def read(path: Path) -> str:
    """A file's content without white space around it; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def names_in(folder: Path) -> list[str]:
    """Names in a folder, sorted; none where there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def memlock_bytes() -> int:
    """RLIMIT_MEMLOCK of this process; UNLIMITED for none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft
