"""How fast processes grow: a slope over all lives of each part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import psutil

WARM_UP_S = 10.0
"""A process grows while it warms up: younger samples do not count. Seconds."""


class Memory:
    """Resident memory of parts by name; each process id is a life of its own."""

    def __init__(self) -> None:
        self._lives: dict[str, dict[int, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))

    def sample(self, pids: dict[str, int], now: float) -> None:
        """Takes one sample of each part, with its age; parts that have just died are passed over."""
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                age = now - process.create_time()
                if age >= WARM_UP_S:
                    self._lives[name][pid].append((age, process.memory_info().rss))
            except psutil.Error:
                continue

    def slopes(self) -> dict[str, float]:
        """Bytes a second by part, for those with enough samples."""
        found = {name: slope(list(lives.values())) for name, lives in self._lives.items()}
        return {name: value for name, value in sorted(found.items()) if value is not None}


def slope(lives: Sequence[Sequence[tuple[float, int]]]) -> float | None:
    """Least squares of bytes over seconds, each life about its own mean; None where no life has two samples."""
    above = below = 0.0
    for life in lives:
        mean_age = sum(age for age, _ in life) / max(1, len(life))
        mean_size = sum(size for _, size in life) / max(1, len(life))
        above += sum((age - mean_age) * (size - mean_size) for age, size in life)
        below += sum((age - mean_age) ** 2 for age, _ in life)
    return above / below if below else None
