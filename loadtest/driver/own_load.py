"""CPU time that the generator used, waited for and lost to other tenants: explains a late schedule."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """The generator's CPU use over a run, as shares of its duration."""

    cpu_share: float
    """Time on a core. Near 1, one whole core, the generator is at its limit."""
    waited_share: float | None
    """Time that it was runnable but had no core, summed over threads; None if the system does not report it."""
    stolen_share: float | None
    """Share of the cores' time that the hypervisor gave to others; None if not reported."""

    def __str__(self) -> str:
        parts = [f"used {self.cpu_share:.0%} of a core"]
        if self.waited_share is not None:
            parts.append(f"waited {self.waited_share:.1%} of the time for one")
        if self.stolen_share:
            parts.append(f"the hypervisor took {self.stolen_share:.1%}")
        return ", ".join(parts)


class OwnLoadMeter:
    """Measures from its construction to `read`."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._cpu_s = time.process_time()
        self._waited_s = _waited_s()
        self._ticks = _ticks()

    def read(self) -> OwnLoad:
        """The shares so far."""
        duration_s = max(time.perf_counter() - self._start_s, 1e-9)
        waited_s, ticks = _waited_s(), _ticks()
        waited_share = stolen_share = None
        if waited_s is not None and self._waited_s is not None:
            waited_share = max(waited_s - self._waited_s, 0.0) / duration_s
        if ticks is not None and self._ticks is not None:
            total, stolen = ticks[0] - self._ticks[0], ticks[1] - self._ticks[1]
            stolen_share = stolen / total if total > 0 else 0.0
        return OwnLoad((time.process_time() - self._cpu_s) / duration_s, waited_share, stolen_share)


def _waited_s() -> float | None:
    """Sum over this process's threads, from Linux's schedstat: ns on a core, ns waiting for one, time slices."""
    waited_ns = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            try:
                waited_ns += int((task / "schedstat").read_text().split()[1])
            except FileNotFoundError:
                continue  # the thread has ended
    except (OSError, ValueError, IndexError):
        return None
    return waited_ns / 1e9


def _ticks() -> tuple[int, int] | None:
    """All cores' ticks and the stolen ones among them, since the system started."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(fields), fields[7]) if len(fields) == 8 else None
