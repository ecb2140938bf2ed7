"""How much processor time the cgroups of this process allow it: containers set that apart from the affinity mask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def read_quota(root: Path = Path("/")) -> float | None:
    """The quota in CPUs, such as 2.5: the least of this process's cgroup and those around it; None where none limits
    it.

    Reads cgroups of both versions below `root`. Raises nothing.
    """
    limits = [limit for folder in _folders(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """Folders of this process's CPU cgroup and of all around it, in each hierarchy that has one.

    A container sees its own cgroup as the hierarchy's root, while its path may still be the host's: then the folder is
    not there, and the root is among those around it.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            mounts = ("", "unified")
        elif "cpu" in controllers.split(","):
            mounts = (controllers, "cpu")
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for mount in dict.fromkeys(mounts):
            for part in (own, *own.parents):
                yield root / "sys/fs/cgroup" / mount / part


def _limit(folder: Path) -> float | None:
    try:
        if (unified := folder / "cpu.max").exists():
            quota, period = unified.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # no limit: "max" is no number
        return None
